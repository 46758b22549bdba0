"""The server without a model: answers, streams, statuses, and what becomes of requests that nobody waits for."""

import asyncio
import json
import time
from functools import partial

import pytest
from tokenizers import Tokenizer

from tests.fake_server import serving, until

BASE = {"model": "m", "prompt": [10], "max_tokens": 3}


@pytest.fixture(scope="module")
def tokenizer(data):
    tokenizer = Tokenizer.from_file(str(data / "glm4_moe_a" / "tokenizer.json"))
    tokenizer.add_special_tokens([f"<|pad{number}|>" for number in range(tokenizer.get_vocab_size(), 384)])
    tokenizer.add_special_tokens(["<|extra|>"])  # 384, one more than the model has
    return tokenizer


@pytest.fixture
def serve(tokenizer):
    return partial(serving, tokenizer)


def events_of(text):
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    return [json.loads(line) for line in lines[:-1]], lines[-1]


def test_a_completion_whole_and_in_events(serve, tokenizer):
    async def body(server):
        whole = await server.client.post("/v1/completions", json=BASE)
        stream = await server.client.post(
            "/v1/completions", json={**BASE, "stream": True, "stream_options": {"include_usage": True}}
        )
        return whole, stream

    whole, stream = serve(body)
    document = whole.json()
    (choice,) = document["choices"]
    text = tokenizer.decode([11, 12, 13])
    assert choice == {"index": 0, "text": text, "logprobs": None, "finish_reason": "length"}
    assert document["usage"] == {"prompt_tokens": 1, "completion_tokens": 3, "total_tokens": 4}
    assert (document["object"], document["model"]) == ("text_completion", "m") and document["id"].startswith("cmpl-")
    chunks, last = events_of(stream.text)
    assert stream.headers["content-type"] == "text/event-stream; charset=utf-8" and last == "[DONE]"
    assert "".join(c["choices"][0]["text"] for c in chunks[:-1]) == text
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"] == document["usage"]
    assert [c["choices"][0]["finish_reason"] for c in chunks[:-1]][-1] == "length"


def test_a_chat_whole_and_in_events(serve):
    async def body(server):
        asked = {"model": "m", "messages": [{"role": "user", "content": "!"}], "max_completion_tokens": 2}
        whole = await server.client.post("/v1/chat/completions", json=asked)
        stream = await server.client.post("/v1/chat/completions", json={**asked, "stream": True})
        return whole.json(), events_of(stream.text)

    whole, (chunks, last) = serve(body, template="{{ messages[0].content }}")
    assert whole["choices"][0]["message"] == {"role": "assistant", "content": '"#'}  # tokens 4 and 5
    assert whole["usage"] == {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3}
    deltas = [c["choices"][0]["delta"] for c in chunks]
    assert deltas[0] == {"role": "assistant", "content": ""} and last == "[DONE]"
    assert "".join(d.get("content", "") for d in deltas) == '"#'
    assert {c["object"] for c in chunks} == {"chat.completion.chunk"}


def test_end_tokens_and_stop_strings_end_an_answer(serve):
    async def body(server):
        end = await server.client.post("/v1/completions", json={**BASE, "prompt": [381], "max_tokens": 9})
        on = await server.client.post(
            "/v1/completions", json={**BASE, "prompt": [381], "max_tokens": 9, "ignore_eos": True}
        )
        stop = await server.client.post("/v1/completions", json={**BASE, "max_tokens": 50, "stop": ["z", "."]})
        await until(lambda: server.scheduler.blocks.num_used == 0)
        return end.json(), on.json(), stop.json()

    end, on, stop = serve(body)
    assert (end["choices"][0]["finish_reason"], end["usage"]["completion_tokens"]) == ("stop", 2)
    assert (on["choices"][0]["finish_reason"], on["usage"]["completion_tokens"]) == ("length", 9)
    assert stop["choices"][0] == {"index": 0, "text": ")*+,-", "logprobs": None, "finish_reason": "stop"}
    assert stop["usage"]["completion_tokens"] == 6


STATUSES = [
    ("POST", "/v1/completions", {"model": "other"}, 404, "model_not_found"),
    ("POST", "/v1/completions", {"max_tokens": 64}, 400, "context_length_exceeded"),
    ("POST", "/v1/completions", {"prompt": [5] * 64}, 400, "context_length_exceeded"),
    ("POST", "/v1/completions", {"prompt": "word " * 100}, 400, "context_length_exceeded"),
    ("POST", "/v1/completions", {"prompt": "word " * 2000}, 400, "context_length_exceeded"),
    ("POST", "/v1/completions", {"prompt": [384]}, 422, "invalid_value"),
    ("POST", "/v1/completions", {"prompt": ""}, 422, "invalid_value"),
    ("POST", "/v1/completions", {"prompt": "a <|extra|>"}, 400, "invalid_value"),
    ("POST", "/v1/completions", {"prompt": "x" * 20000}, 413, "body_too_large"),
    ("POST", "/v1/completions", {"n": 3}, 422, "unsupported_parameter"),
    ("POST", "/v1/chat/completions", {}, 422, "invalid_value"),
    ("GET", "/v1/completions", None, 405, "no_such_route"),
    ("GET", "/v1/models/other", None, 404, "model_not_found"),
    ("GET", "/nowhere", None, 404, "no_such_route"),
]


def test_statuses(serve):
    async def body(server):
        for method, path, more, status, code in STATUSES:
            answer = await server.client.request(method, path, json=None if more is None else {**BASE, **more})
            error = answer.json()["error"]
            assert (answer.status_code, error["code"]) == (status, code), (path, more, error)
            assert set(error) == {"message", "type", "param", "code"} and error["message"]
        assert (await server.client.get("/v1/models")).json()["data"][0]["id"] == "m"
        assert (await server.client.get("/v1/models/m")).json()["max_model_len"] == 64
        assert (await server.client.get("/health")).json() == {"status": "ok"}

    serve(body, max_body_bytes=16384)


def test_a_key_is_asked_for(serve):
    async def body(server):
        for headers, status in (
            ({}, 401),
            ({"authorization": "Bearer wrong"}, 401),
            ({"authorization": "Basic secret"}, 401),
            ({"authorization": "Bearer secr\xe9t".encode("latin-1")}, 401),
            ({"authorization": "bearer secret"}, 200),
        ):
            for method, path in (("GET", "/v1/models"), ("GET", "/v1/models/m"), ("POST", "/v1/completions")):
                answer = await server.client.request(
                    method, path, json=BASE if method == "POST" else None, headers=headers
                )
                assert answer.status_code == status, (headers, path, answer.text)
        assert answer.json()["usage"]["completion_tokens"] == 3
        assert (await server.client.get("/health")).status_code == 200

    serve(body, api_key="secret")


def test_too_many_at_a_time_are_told_to_come_again(serve):
    async def body(server):
        server.runner.gate.clear()
        calls = [asyncio.create_task(server.client.post("/v1/completions", json=BASE)) for _ in range(5)]
        await until(lambda: server.frontend.num_in_flight == 5)
        refused = await server.client.post("/v1/completions", json=BASE)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
        assert refused.headers["retry-after"] == "1" and refused.json()["error"]["type"] == "rate_limit_error"
        server.runner.gate.set()
        assert [answer.status_code for answer in await asyncio.gather(*calls)] == [200] * 5
        assert (await server.client.post("/v1/completions", json=BASE)).status_code == 200

    serve(body, max_num_seqs=2, max_waiting=3)


def test_draining_finishes_what_runs_and_takes_nothing_new(serve):
    async def body(server):
        server.runner.gate.clear()
        running = asyncio.create_task(server.client.post("/v1/completions", json=BASE))
        await until(lambda: server.frontend.num_in_flight == 1)
        server.frontend.drain(5)
        refused = await server.client.post("/v1/completions", json=BASE)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
        assert (await server.client.get("/health")).status_code == 503
        server.runner.gate.set()
        assert (await running).json()["usage"]["completion_tokens"] == 3
        await until(lambda: not server.thread.is_alive())

    serve(body)


def test_what_the_engine_will_not_finish_is_an_error(serve):
    async def body(server):
        server.runner.gate.clear()
        whole = asyncio.create_task(server.client.post("/v1/completions", json=BASE))
        stream = asyncio.create_task(server.client.post("/v1/completions", json={**BASE, "stream": True}))
        await until(lambda: server.frontend.num_in_flight == 2)
        server.frontend.close_soon("a rank is gone")
        assert ((await whole).status_code, (await whole).json()["error"]["message"]) == (503, "a rank is gone")
        _, last = events_of((await stream).text)
        assert json.loads(last)["error"]["message"] == "a rank is gone"
        assert (await server.client.post("/v1/completions", json=BASE)).status_code == 503

    serve(body)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("send_fails", [True, False])
def test_a_client_that_leaves_frees_its_sequence(serve, stream, send_fails):
    async def body(server):
        messages = asyncio.Queue()
        asked = json.dumps({**BASE, "max_tokens": 50, "stream": stream}).encode()
        messages.put_nowait({"type": "http.request", "body": asked, "more_body": False})

        async def send(message):
            if send_fails and message["type"] == "http.response.body":
                raise OSError("gone")

        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "raw_path": b"/v1/completions"}
        scope |= {"headers": [], "query_string": b"", "http_version": "1.1", "scheme": "http", "asgi": {}}
        server.runner.gate.clear()
        server.runner.step_seconds = 0.02
        call = asyncio.create_task(server.app(scope, messages.get, send))
        await until(lambda: server.frontend.num_in_flight == 1)
        if send_fails:
            server.runner.gate.set()
        else:
            messages.put_nowait({"type": "http.disconnect"})
        await asyncio.wait_for(call, 5)
        assert server.frontend.num_in_flight == 0
        server.runner.gate.set()
        await until(lambda: server.scheduler.blocks.num_used == 0 and not len(server.scheduler))
        assert server.engine.num_steps < 40 or (send_fails and not stream)  # a whole answer is sent when it is there
        assert (await server.client.post("/v1/completions", json=BASE)).status_code == 200
        assert server.api.metrics.requests.values == {("/v1/completions", "499"): 1, ("/v1/completions", "200"): 1}
        assert server.api.metrics.disconnects.values[()] == 1

    serve(body)


def test_an_idle_engine_meets_the_other_ranks_and_does_not_spin(serve):
    async def body(server):
        meetings = []
        exchange = server.engine.channel.exchange
        server.engine.channel.exchange = lambda *args: meetings.append(args[0]) or exchange(*args)
        begin = time.monotonic()
        while len(meetings) < 5:  # the outer deadline ends it
            await asyncio.sleep(0.05)
        return list(meetings), time.monotonic() - begin

    meetings, seconds = serve(body)
    assert set(meetings) == {None} and len(meetings) <= 30 * seconds + 2
