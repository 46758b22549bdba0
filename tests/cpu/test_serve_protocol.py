"""What requests may hold: JSON, fields, conversations; each refusal with its status and its place."""

import asyncio
import json

import pytest

from fastdeploy_fusion.serve.chat import ChatTemplate
from fastdeploy_fusion.serve.errors import ApiError
from fastdeploy_fusion.serve.json_body import parse_object, read_body
from fastdeploy_fusion.serve.protocol import ChatRequest, CompletionRequest, parse_request
from fastdeploy_fusion.serve.settings import ServeSettings


def refusal(step, *args):
    with pytest.raises(ApiError) as caught:
        step(*args)
    return caught.value


@pytest.mark.parametrize(
    "body, words",
    [
        (b"", "Expecting value"),
        (b"{", "Expecting"),
        (b"[1]", "must be an object"),
        (b'"text"', "must be an object"),
        (b'{"a": NaN}', "NaN is not JSON"),
        (b'{"a": -Infinity}', "is not JSON"),
        (b'{"a": "\xff"}', "not UTF-8 at byte 7"),
        (b'{"a": "\\ud800"}', "surrogate"),
        (b'{"a": ' + b"[" * 100000, "nested too deeply"),
        (b'{"a": ' + b"9" * 5000 + b"}", "digits"),
        (b"{} {}", "Extra data"),
        (b'\xef\xbb\xbf{"a": 1}', "BOM"),
    ],
)
def test_bodies_that_are_no_json_object(body, words):
    error = refusal(parse_object, body)
    assert (error.status, error.code) == (400, "invalid_json") and words in error.message


def test_a_surrogate_pair_is_a_character():
    assert parse_object(b'{"a": "\\ud83d\\ude42"}') == {"a": "🙂"}


def read(parts, headers=None, limit=10, seconds=1.0, pause=0.0):
    async def chunks():
        for part in parts:
            await asyncio.sleep(pause)
            yield part

    return asyncio.run(read_body(chunks(), headers or {}, limit, seconds))


def test_bodies_are_limited_in_size_and_time():
    assert read([b"12345", b"67890"]) == b"1234567890"
    for parts, headers in (([b"12345", b"678901"], {}), ([b"1"], {"content-length": "11"})):
        assert refusal(read, parts, headers).status == 413
    assert refusal(read, [b"1"], {"content-length": "9" * 400}).status == 413
    assert refusal(read, [b"1", b"2"], {}, 10, 0.05, 0.04).status == 408


BASE = {"model": "m", "prompt": "p"}


@pytest.mark.parametrize(
    "more",
    [
        {"max_tokens": None, "temperature": 0, "top_p": 1, "seed": -3, "stop": None, "stream": False, "n": 1},
        {"stop": ["a", "b"], "temperature": 0.5, "user": "u", "metadata": {"k": "v"}, "logit_bias": {}},
        {"logprobs": None, "presence_penalty": 0.0, "frequency_penalty": 0, "best_of": 1, "echo": False},
        {"prompt": [1, 2]},
        {"prompt": ["p"]},
        {"prompt": [[1, 2]]},
        {"stream": True, "stream_options": {"include_usage": True}},
    ],
)
def test_what_is_taken(more):
    request = parse_request(CompletionRequest, {**BASE, **more})
    assert request.single_prompt in ("p", [1, 2])


@pytest.mark.parametrize(
    "more, param",
    [
        ({"model": 1}, "model"),
        ({"model": None}, "model"),
        ({"prompt": None}, "prompt"),
        ({"prompt": {}}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [1.5]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -5}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.01}, "top_p"),
        ({"seed": 1e3}, "seed"),
        ({"seed": 2**64}, "seed"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a"] * 5}, "stop"),
        ({"stop": ["a", ""]}, "stop"),
        ({"stop": "x" * 300}, "stop"),
        ({"stop": [1]}, "stop"),
        ({"stream": "yes"}, "stream"),
        ({"stream": 1}, "stream"),
        ({"stream_options": []}, "stream_options"),
        ({"n": 2}, "n"),
        ({"n": True}, "n"),
        ({"best_of": 3}, "best_of"),
        ({"echo": True}, "echo"),
        ({"logprobs": 3}, "logprobs"),
        ({"logit_bias": {"1": 5}}, "logit_bias"),
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"tools": [{}]}, "tools"),
        ({"unknown": 1}, "unknown"),
        ({"model_config": 1}, "model_config"),
    ],
)
def test_what_is_refused(more, param):
    error = refusal(parse_request, CompletionRequest, {**BASE, **more})
    assert (error.status, error.param) == (422, param), error.message
    assert set(error.body["error"]) == {"message", "type", "param", "code"}
    assert json.dumps(error.body) and len(error.message) < 600


def chat(messages, **more):
    return parse_request(ChatRequest, {"model": "m", "messages": messages, **more})


def test_messages():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    request = chat([{"role": "user", "content": parts}, {"role": "assistant", "content": None}], max_tokens=3)
    assert [m.plain() for m in request.messages] == [
        {"role": "user", "content": "ab"},
        {"role": "assistant", "content": ""},
    ]
    assert request.token_limit == 3
    assert chat([{"role": "user", "content": "a"}], max_tokens=3, max_completion_tokens=2).token_limit == 2
    for wrong in (
        [],
        "hello",
        [{"content": "a"}],
        [{"role": "king", "content": "a"}],
        [{"role": "user", "content": 5}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}],
        [{"role": "user", "content": "a", "extra": 1}],
    ):
        assert refusal(chat, wrong).status == 422


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
    error = refusal(ChatTemplate(source).render, MESSAGES)
    assert (error.status, error.param) == (400, "messages")


def test_a_template_that_is_none_is_said_at_the_start(tmp_path):
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{% for %}"}))
    with pytest.raises(ValueError, match="chat template"):
        ChatTemplate.load(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[")
    with pytest.raises(ValueError, match="tokenizer_config"):
        ChatTemplate.load(tmp_path)


@pytest.mark.parametrize(
    "wrong, words",
    [
        ({"port": 70000}, "port is 70000"),
        ({"kv_cache_tokens": 8}, "at least one block"),
        ({"max_num_seqs": 100, "max_num_batched_tokens": 50}, "max_num_seqs 100"),
        ({"api_key": ""}, "API key"),
        ({"api_key": "a\nb"}, "API key"),
        ({"max_body_bytes": 0}, "max_body_bytes"),
    ],
)
def test_settings_that_make_no_server(wrong, words):
    with pytest.raises(ValueError, match=words):
        ServeSettings(**wrong)
