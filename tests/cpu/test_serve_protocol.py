"""What requests may hold: JSON and fields; each refusal with its status and its place."""

import asyncio
import json
import time

import pytest

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
        {"functions": None, "verbosity": None, "stream_options": {"other": None}},
    ],
)
def test_what_is_taken(more):
    request = parse_request(CompletionRequest, {**BASE, **more})
    assert request.prompt in ("p", [1, 2])


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
        [{"role": "user", "content": [{"type": "text"}]}],
        [{"role": "user", "content": [{"type": "text", "text": "a", "more": 1}]}],
        [{"role": "user", "content": ["a"]}],
        [{"role": "assistant", "content": "a", "tool_calls": [{"id": "c"}]}],
        [{"role": "user", "content": "a"}] * 4097,
        [{"role": "user", "content": "a", "extra": 1}],
    ):
        assert refusal(chat, wrong).status == 422


def test_what_a_client_sends_back_of_an_answer_is_taken():
    answer = {"role": "assistant", "content": "a", "refusal": None, "tool_calls": None, "audio": None}
    tool = {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "4", "cache_control": None}]}
    assert [m.plain() for m in chat([answer, {**answer, "tool_calls": [], "annotations": []}, tool]).messages] == [
        {"role": "assistant", "content": "a"},
        {"role": "assistant", "content": "a"},
        {"role": "tool", "content": "4", "tool_call_id": "c1"},
    ]


@pytest.mark.parametrize(
    "more, message",
    [
        ({"stop": list("abcde")}, "stop: 5 strings; at most 4 are taken"),
        ({"stop": [""]}, "stop: an empty string; a stop string has 1 to 256 characters"),
        ({"prompt": ["a", "b"]}, "prompt: a list of 2 prompts; one is answered at a time, so send a request for each"),
        ({"prompt": [1, -2]}, "prompt: -2 at place 1; token ids are whole numbers of at least 0"),
        ({"prompt": []}, "prompt: an empty list; it must hold at least one token id"),
        ({"{bogus}": 1}, "{bogus} is not a field that is known here; leave it out"),
    ],
)
def test_a_refusal_says_what_is_wrong(more, message):
    assert refusal(parse_request, CompletionRequest, {**BASE, **more}).message == message


MANY = 340_000  # values of 3 bytes in a body of 1 MiB


@pytest.mark.parametrize(
    "kind, values",
    [
        (CompletionRequest, {"prompt": [{}] * MANY}),
        (CompletionRequest, {"prompt": [-1] * MANY}),
        (CompletionRequest, {"prompt": [[]] * MANY}),
        (CompletionRequest, {"prompt": [[-1] * MANY]}),
        (CompletionRequest, {"prompt": "p", "stop": [""] * MANY}),
        (CompletionRequest, {"prompt": "p"} | {str(number): 0 for number in range(100_000)}),
        (ChatRequest, {"messages": [{"role": "user", "content": [{}] * MANY}]}),
        (ChatRequest, {"messages": [{}] * MANY}),
        (ChatRequest, {"messages": [{str(number): 0 for number in range(100_000)}]}),
    ],
)
def test_a_body_that_is_wrong_in_many_places_is_refused_at_the_first(kind, values):
    begin = time.process_time()
    error = refusal(parse_request, kind, {"model": "m", **values})
    assert error.status == 422 and time.process_time() - begin < 0.2
    assert len(error.message) < 300 and len(error.param) < 300


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
