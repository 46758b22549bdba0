"""Hundreds of malformed requests: the right 4xx each, and the server still answers."""

import random

import pytest
from tokenizers import Tokenizer

from tests.fake_server import serving, until
from tests.malformed import MAX_BODY, PATHS, is_error, malformed_body


@pytest.mark.parametrize("seed", range(4))
def test_malformed_bodies(data, seed):
    async def body(server):
        rng, seen = random.Random(seed), set()
        for _ in range(150):
            path = rng.choice(PATHS)
            content, statuses = malformed_body(rng, "m", path)
            answer = await server.client.post(path, content=content)
            assert answer.status_code in statuses, (content[:300], answer.text)
            assert answer.status_code == 200 or is_error(answer.json())
            seen.add(answer.status_code)
        assert seen >= {400, 413, 422}
        answer = await server.client.post(PATHS[0], json={"model": "m", "prompt": [10], "max_tokens": 3})
        assert answer.json()["usage"]["completion_tokens"] == 3
        await until(lambda: server.scheduler.blocks.num_used == 0)

    tokenizer = Tokenizer.from_file(str(data / "glm4_moe_a" / "tokenizer.json"))
    serving(tokenizer, body, max_body_bytes=MAX_BODY)
