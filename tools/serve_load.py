"""Clients for bench_serve.py: plain sockets and as little work a token as possible, since they share the cores."""

import asyncio
import json
import random
import time
from dataclasses import dataclass, field

PROMPT_TOKENS = (8, 16, 32, 64, 128)
MAX_TOKENS = 32


@dataclass
class Record:
    """What one side answered. Seconds: ``first`` to the first token, ``gaps`` between later ones, ``whole``."""

    first: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    whole: list[float] = field(default_factory=list)
    tokens: int = 0
    errors: list[str] = field(default_factory=list)
    seconds: float = 0.0


async def _ask(host: str, port: int, body: bytes, record: Record) -> None:
    begin = before = time.monotonic()
    reader, writer = await asyncio.open_connection(host, port)
    try:
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        )
        writer.write(head.encode() + body)
        status = await reader.readline()
        if b" 200 " not in status:
            record.errors.append((status + await reader.read())[:300].decode(errors="replace"))
            return
        usage, seen = None, False
        while line := await reader.readline():
            if not line.startswith(b"data: {"):
                continue
            now = time.monotonic()
            chunk = json.loads(line[6:])
            if chunk.get("usage"):
                usage = chunk["usage"]["completion_tokens"]
            elif "error" in chunk:
                record.errors.append(str(chunk["error"]))
                return
            else:
                (record.gaps if seen else record.first).append(now - before)
                seen, before = True, now
        if usage != MAX_TOKENS:
            record.errors.append(f"the stream ended with {usage} tokens of {MAX_TOKENS}")
            return
        record.whole.append(before - begin)
        record.tokens += usage
    except OSError as error:
        record.errors.append(f"{type(error).__name__}: {error}")
    finally:
        writer.close()


async def _client(number: int, host: str, port: int, model: str, until: float, record: Record) -> None:
    rng = random.Random(number)
    while time.monotonic() < until:
        prompt = [rng.randrange(3, 384) for _ in range(rng.choice(PROMPT_TOKENS))]
        asked = {"model": model, "prompt": prompt, "max_tokens": MAX_TOKENS, "temperature": 0, "ignore_eos": True}
        asked |= {"stream": True, "stream_options": {"include_usage": True}}
        await _ask(host, port, json.dumps(asked).encode(), record)


def load(url: str, model: str, clients: int, seconds: float, record: Record) -> None:
    """``clients`` ask all the time for ``seconds``; returns when the last answer is there."""
    host, _, port = url.removeprefix("http://").rpartition(":")

    async def run() -> None:
        until = time.monotonic() + seconds
        await asyncio.gather(*(_client(i, host, int(port), model, until, record) for i in range(clients)))

    begin = time.monotonic()
    asyncio.run(run())
    record.seconds += time.monotonic() - begin
