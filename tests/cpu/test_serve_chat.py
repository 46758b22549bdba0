"""From a conversation to a prompt: the plain template, the checkpoint's own, and what a template may do."""

import json

import pytest

from fastdeploy_fusion.serve.chat import ChatTemplate
from fastdeploy_fusion.serve.errors import ApiError

MESSAGES = [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}]


def test_the_plain_template_and_the_checkpoints_own(tmp_path):
    assert ChatTemplate.load(tmp_path).render(MESSAGES) == "system: S\nuser: U\nassistant:"
    own = "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>{{ m.content | tojson }}{% endfor %}"
    config = {"bos_token": {"content": "<s>"}, "chat_template": own}
    file = tmp_path / "tokenizer_config.json"
    file.write_text(json.dumps(config))
    assert ChatTemplate.load(tmp_path).render(MESSAGES) == '<s><|system|>"S"<|user|>"U"'
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "{{ eos_token }}yes"}]
    file.write_text(json.dumps({"eos_token": "</s>", "chat_template": named}))
    assert ChatTemplate.load(tmp_path).render(MESSAGES) == "</s>yes"
    (tmp_path / "chat_template.jinja").write_text("from the file")
    assert ChatTemplate.load(tmp_path).render(MESSAGES) == "from the file"


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('only users speak') }}",
        "{{ messages[5].content }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ 1 / 0 }}",
        "{% for i in range(10**9) %}{% endfor %}",
    ],
)
def test_what_a_template_does_not_take_is_the_clients_error(source):
    with pytest.raises(ApiError) as caught:
        ChatTemplate(source).render(MESSAGES)
    assert (caught.value.status, caught.value.param) == (400, "messages")


def test_a_template_that_is_none_is_said_at_the_start(tmp_path):
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{% for %}"}))
    with pytest.raises(ValueError, match="chat template"):
        ChatTemplate.load(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[")
    with pytest.raises(ValueError, match="tokenizer_config"):
        ChatTemplate.load(tmp_path)


@pytest.mark.parametrize(
    "source, prompt",
    [
        ("{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %},{% endfor %}", "S,U,"),
        ("{% set a = 1 %}{% generation %}{% set a = 2 %}{% endgeneration %}{{ a }}", "1"),
        ("{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m.content }}{% endfor %}", "U"),
        ("{{ {'b': '<', 'a': 1} | tojson(separators=(',', ':'), sort_keys=True) }}", '{"a":1,"b":"<"}'),
        ("{{ ['é'] | tojson(ensure_ascii=True, indent=1) }}", '[\n "\\u00e9"\n]'),
        (
            "{% if tools is not none %}T{% endif %}{% if documents is not none %}D{% endif %}{{ strftime_now('%%') }}",
            "%",
        ),
    ],
)
def test_a_template_runs_as_transformers_runs_it(source, prompt):
    assert ChatTemplate(source).render(MESSAGES) == prompt
