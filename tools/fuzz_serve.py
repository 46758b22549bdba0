#!/usr/bin/env python3
"""A thousand malformed requests against a real server of two ranks: each gets its 4xx, and the server still answers.

    python tools/fuzz_serve.py                  # 1,000 requests, seed 0
    python tools/fuzz_serve.py --count 5000 --seed 3

Bad JSON, wrong types, huge fields, invalid UTF-8, broken HTTP, connections cut at any place. Exit code 1 if one is
answered wrongly, if the server stops answering, or if anything is left in its cache.
"""

import argparse
import json
import random
import socket
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

PROMPT = [5, 9, 200]


def cut(rng: random.Random, host: str, port: int, model: str) -> str:
    """Sends part of a request, or no HTTP at all, and hangs up; sometimes it reads a little first."""
    body = json.dumps({"model": model, "prompt": "cut", "max_tokens": 60, "stream": rng.random() < 0.5}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    whole = head + body
    kind = rng.randrange(4)
    content = {0: whole[: rng.randrange(len(whole))], 1: whole, 2: rng.randbytes(rng.randrange(1, 3000)) + b"\r\n\r\n"}
    content[3] = head.replace(b"Content-Length", b"Content-Length: -1\r\nX" * rng.randrange(1, 3)) + body
    with socket.create_connection((host, port), timeout=60) as sock:
        sock.sendall(content[kind])
        if kind == 1 and rng.random() < 0.5:
            sock.recv(rng.randrange(1, 500))
        if kind == 2 or kind == 3:
            return sock.recv(12).decode(errors="replace")[9:] or "closed"
    return "cut"


def run(count: int, seed: int) -> int:
    import httpx

    from tests.malformed import MAX_BODY, PATHS, is_error, malformed_body
    from tests.servers import FUSED, Server

    rng, answers, problems = random.Random(seed), Counter[str](), []

    def ask(http: Any, server: Any) -> Any:
        whole = {"model": server.name, "prompt": PROMPT, "max_tokens": 8, "temperature": 0}
        return http.post(PATHS[0], json=whole).json()["choices"][0]["text"]

    with Server(ROOT / "tests" / "data" / "glm4_moe_a", *FUSED, "--max-body-bytes", MAX_BODY) as server:
        host, _, port = server.url.removeprefix("http://").rpartition(":")
        with httpx.Client(base_url=server.url, timeout=30) as http:
            want = ask(http, server)
            for number in range(count):
                if rng.random() < 0.3:
                    answers[cut(rng, host, int(port), server.name)] += 1
                    continue
                path = rng.choice(PATHS)
                body, statuses = malformed_body(rng, server.name, path)
                answer = http.post(path, content=body)
                answers[str(answer.status_code)] += 1
                if answer.status_code not in statuses or (answer.status_code != 200 and not is_error(answer.json())):
                    problems.append(f"{number}: {body[:200]!r} got {answer.status_code} {answer.text[:200]}")
            if ask(http, server) != want:
                problems.append("the server does not answer as before")
        deadline = time.monotonic() + 10
        while (used := server.metrics()["fdfusion_kv_tokens_used"]) and time.monotonic() < deadline:
            time.sleep(0.1)
        if used:
            problems.append(f"{used:g} tokens are left in the cache")
        code, _ = server.end()
        if code != 0:
            problems.append(f"exit code {code}: {server.errors()[1][-1000:]}")
    print(f"{count} requests: " + ", ".join(f"{how} {times}" for how, times in sorted(answers.items())))
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    return 1 if problems else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1000, metavar="N")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    args = parser.parse_args()
    return run(args.count, args.seed)


if __name__ == "__main__":
    sys.exit(main())
