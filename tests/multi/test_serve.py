"""One server on two fused ranks, as OpenAI's own client sees it."""

import json
import random
import shutil
import socket
import threading
import time

import httpx
import openai
import pytest

from tests.malformed import MAX_BODY, PATHS, is_error, malformed_body
from tests.servers import FUSED, Server

KEY = "a-key"
TEMPLATE = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}<|assistant|>"
LIMITS = ("--kv-cache-tokens", 1024, "--max-num-batched-tokens", 32, "--max-num-seqs", 8, "--max-waiting", 24)


@pytest.fixture(scope="module")
def server(data, tmp_path_factory):
    """Small budgets, so that prompts are read in pieces and requests wait."""
    model = tmp_path_factory.mktemp("served") / "tiny"
    shutil.copytree(data / "glm4_moe_a", model)
    (model / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    flags = (*FUSED, *LIMITS, "--max-body-bytes", MAX_BODY)
    with Server(model, *flags, FDFUSION_API_KEY=KEY, FDFUSION_CALL_TIMEOUT_S="6") as server:
        yield server
        deadline = time.monotonic() + 5
        while (used := server.metrics()["fdfusion_kv_tokens_used"]) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert used == 0
        code, seconds = server.end()
        assert (code, server.errors()[0]) == (0, []) and seconds < 10


@pytest.fixture
def client(server):
    return server.client(api_key=KEY)


@pytest.fixture(scope="module")
def expected(data):
    return json.loads((data / "glm4_moe_a" / "expected_text.json").read_text(encoding="utf-8"))


def complete(client, prompt, **options):
    return client.completions.create(model="tiny", prompt=prompt, **{"temperature": 0, "max_tokens": 24, **options})


def test_it_says_when_it_is_ready_and_what_it_serves(server, client):
    assert server.ready_line.endswith("fused: fits the fused workspace (shm)\n")
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert httpx.get(f"{server.url}/health").json() == {"status": "ok"}
    assert server.errors()[1].count("uvicorn") == 0


def test_completions_are_the_references(client, expected):
    for entry in expected:
        answer = complete(client, entry["prompt"])
        assert answer.choices[0].text == entry["text"] and answer.choices[0].finish_reason == "length"
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(entry["prompt_ids"]), 24)
        assert complete(client, entry["prompt_ids"]).choices[0].text == entry["text"]


def test_streams_are_the_references(client, expected):
    for entry in expected[2:4]:
        chunks = list(complete(client, entry["prompt"], stream=True, stream_options={"include_usage": True}))
        assert "".join(c.choices[0].text for c in chunks[:-1]) == entry["text"] and len(chunks) > 5
        assert chunks[-1].usage.completion_tokens == 24 and chunks[-2].choices[0].finish_reason == "length"


def test_chat_uses_the_checkpoints_template(client):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    options = {"model": "tiny", "messages": messages, "temperature": 0, "max_tokens": 12}
    whole = client.chat.completions.create(**options)
    text = whole.choices[0].message.content
    assert text and whole.choices[0].message.role == "assistant" and whole.usage.completion_tokens == 12
    chunks = list(client.chat.completions.create(**options, stream=True))
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == text
    prompt = "<|system|>Be brief.<|user|>Hello<|assistant|>"
    assert complete(client, prompt, max_tokens=12).choices[0].text == text


def test_stop_strings(client, expected):
    text = expected[0]["text"]
    for stop in ("Agu", ["zzz", "The"], "�ef"):
        first = stop if isinstance(stop, str) else stop[-1]
        for stream in (False, True):
            answer = complete(client, expected[0]["prompt"], stop=stop, stream=stream)
            choices = [c.choices[0] for c in (answer if stream else [answer])]
            assert "".join(c.text for c in choices) == text[: text.index(first)]
            assert choices[-1].finish_reason == "stop"


def test_a_seed_repeats_an_answer(client):
    def ask(seed):
        return complete(client, "2 + 2 =", temperature=1.2, top_p=0.95, seed=seed).choices[0].text

    assert ask(5) == ask(5) != ask(6)
    assert complete(client, "2 + 2 =", temperature=1.2).choices[0].text != ask(5)


def test_concurrent_requests_get_what_they_would_get_alone(server, client, expected):
    answers, steps = {}, server.metrics()["fdfusion_engine_steps"]

    def ask(number):
        entry = expected[number % 5]
        time.sleep(number * 0.01)
        if number % 2:
            answers[number] = complete(client, entry["prompt"]).choices[0].text
        else:
            answers[number] = "".join(c.choices[0].text for c in complete(client, entry["prompt"], stream=True))

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(25)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert answers == {number: expected[number % 5]["text"] for number in range(25)}
    after = server.metrics()
    assert after["fdfusion_engine_steps"] - steps < 25 * 24 / 2  # they shared steps
    assert sum(v for k, v in after.items() if 'path="fused"' in k) > 0
    assert sum(v for k, v in after.items() if 'path="plain"' in k) == 0


def test_errors_are_the_clients_own_exceptions(server, client):
    cases = [
        ({"model": "other"}, openai.NotFoundError),
        ({"max_tokens": 10000}, openai.BadRequestError),
        ({"prompt": "word " * 800}, openai.BadRequestError),
        ({"n": 2}, openai.UnprocessableEntityError),
        ({"temperature": 9.0}, openai.UnprocessableEntityError),
        ({"prompt": "x" * 2 * MAX_BODY}, openai.APIStatusError),
    ]
    for wrong, kind in cases:
        with pytest.raises(kind) as caught:
            client.completions.create(**{"model": "tiny", "prompt": "p", "max_tokens": 2, **wrong})
        assert caught.value.body["message"]
    assert caught.value.status_code == 413
    with pytest.raises(openai.AuthenticationError):
        server.client(api_key="wrong").models.list()


def test_a_client_that_leaves_frees_its_sequence(server, client):
    stream = complete(client, "Tensor", max_tokens=400, stream=True, extra_body={"ignore_eos": True})
    next(iter(stream))
    assert server.metrics()["fdfusion_kv_tokens_used"] > 400
    stream.close()
    deadline = time.monotonic() + 3
    while server.metrics()["fdfusion_kv_tokens_used"]:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_malformed_requests_and_cut_connections(server, client, expected):
    rng = random.Random(11)
    host, port = server.url.removeprefix("http://").split(":")
    with httpx.Client(base_url=server.url, headers={"authorization": f"Bearer {KEY}"}, timeout=20) as http:
        for _ in range(100):
            path = rng.choice(PATHS)
            content, statuses = malformed_body(rng, "tiny", path)
            answer = http.post(path, content=content)
            assert answer.status_code in statuses, (content[:300], answer.text)
            assert answer.status_code == 200 or is_error(answer.json())
    for cut in range(60):
        head = f"POST {PATHS[0]} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\nContent-Length: 90\r\n\r\n"
        whole = head.encode() + json.dumps({"model": "tiny", "prompt": "cut", "max_tokens": 200}).encode()
        with socket.create_connection((host, int(port))) as sock:
            sock.sendall(whole.ljust(len(head) + 90)[: 5 * cut] if cut % 3 else rng.randbytes(100) + b"\r\n\r\n")
    assert complete(client, expected[0]["prompt"]).choices[0].text == expected[0]["text"]


def test_idle_for_longer_than_a_calls_time_limit(server, client, expected):
    time.sleep(7.0)  # FDFUSION_CALL_TIMEOUT_S is 6 here
    assert complete(client, expected[0]["prompt"]).choices[0].text == expected[0]["text"]
