"""What `/metrics` says of requests, whatever ended them."""

import asyncio
import re

import pytest
from tokenizers import Tokenizer

from fastdeploy_fusion.serve.metrics import Gauge
from tests.fake_server import serving, until

BASE = {"model": "m", "prompt": [10], "max_tokens": 3}


@pytest.fixture(scope="module")
def tokenizer(data):
    return Tokenizer.from_file(str(data / "glm4_moe_a" / "tokenizer.json"))


def test_metrics(tokenizer):
    async def body(server):
        await server.client.post("/v1/completions", json=BASE)
        await server.client.post("/v1/completions", json={})
        await server.client.get("/elsewhere?q='")
        return (await server.client.get("/metrics")).text

    text = serving(tokenizer, body)
    for line in (
        'fdfusion_requests_total{endpoint="/v1/completions",status="200"} 1',
        'fdfusion_requests_total{endpoint="/v1/completions",status="422"} 1',
        'fdfusion_requests_total{endpoint="other",status="404"} 1',
        "fdfusion_prompt_tokens_total 1",
        "fdfusion_generated_tokens_total 3",
        "fdfusion_time_to_first_token_seconds_count 1",
        "fdfusion_time_between_tokens_seconds_count 2",
        "fdfusion_requests_running 0",
        "fdfusion_kv_tokens 256",
        "fdfusion_tokens_per_second 0.3",
        "fused 1",
    ):
        assert f"\n{line}\n" in "\n" + text, line
    sample = re.compile(r'(# (HELP|TYPE) \w+ .+)|(\w+(\{\w+="[^"]*"(,\w+="[^"]*")*\})? [-+.e\d]+)')
    assert all(map(sample.fullmatch, text.splitlines()))


def test_answers_that_a_stop_string_ends_are_timed_too(tokenizer):
    async def body(server):
        for stream in (False, True):
            asked = {**BASE, "max_tokens": 50, "stop": ".", "stream": stream}
            await server.client.post("/v1/completions", json=asked)
        await until(lambda: server.scheduler.blocks.num_used == 0)
        assert sum(server.api.metrics.latency.counts) == 2

    serving(tokenizer, body)


def test_a_client_that_leaves_while_its_body_comes_is_a_499(tokenizer):
    async def body(server):
        messages = asyncio.Queue()
        messages.put_nowait({"type": "http.request", "body": b"{", "more_body": True})
        messages.put_nowait({"type": "http.disconnect"})
        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "raw_path": b"/v1/completions"}
        scope |= {"headers": [], "query_string": b"", "http_version": "1.1", "scheme": "http", "asgi": {}}

        async def send(message):
            pass

        await server.app(scope, messages.get, send)
        assert server.api.metrics.requests.values == {("/v1/completions", "499"): 1}
        assert server.api.metrics.disconnects.values[()] == 1

    serving(tokenizer, body)


@pytest.mark.parametrize("value, shown", [(12345678, "12345678"), (12345678.0, "12345678"), (0.3, "0.3"), (0, "0")])
def test_whole_numbers_are_whole(value, shown):
    assert list(Gauge("g", "A gauge.", lambda: value).lines())[-1] == f"g {shown}"
