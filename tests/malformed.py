"""Requests as no client should send them, and the statuses that are right for each."""

import json

PATHS = ("/v1/completions", "/v1/chat/completions")
MAX_BODY = 16384
_FIELDS = ("model", "prompt", "max_tokens", "temperature", "top_p", "stop", "stream", "seed", "messages", "bogus")
_VALUES = (None, True, -1, 1.5, 10**30, "", "x" * 5000, [], [[]], {}, {"a": 1}, [None], "\x00", [1, "a"], ["\ud800"])


def malformed_body(rng, model, path):
    """``(body, statuses)`` for ``path``; a server with ``MAX_BODY`` answers with one of them."""
    asked = {"model": model, "max_tokens": 2, "stop": ["x"], "seed": 1}
    if path == PATHS[0]:
        asked["prompt"] = "some words"
    else:
        asked["messages"] = [{"role": "user", "content": "some words"}]
    whole = json.dumps(asked).encode()
    kind = rng.randrange(7)
    if kind == 0:
        return whole[: rng.randrange(len(whole) - 1)], {400}
    if kind == 1:
        place = rng.randrange(len(whole))
        return whole[:place] + bytes([rng.randrange(128, 256)]) + whole[place:], {400}
    if kind == 2:
        return rng.randbytes(rng.randrange(1, 200)), {400}
    if kind == 3:
        return b"[" * rng.randrange(1, 5000), {400}
    if kind == 4:
        return whole[:-1] + b', "user": "' + b"y" * rng.randrange(MAX_BODY, 4 * MAX_BODY) + b'"}', {413}
    if kind == 5:
        return json.dumps(rng.choice([1, "a", [asked], None, True])).encode(), {400}
    asked[rng.choice(_FIELDS)] = rng.choice(_VALUES)
    return json.dumps(asked).encode(), {200, 400, 404, 422}


def is_error(document):
    """Whether it has the shape of OpenAI's errors."""
    error = document.get("error")
    return isinstance(error, dict) and set(error) == {"message", "type", "param", "code"} and bool(error["message"])
