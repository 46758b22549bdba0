"""The `mnnvl` backend: not built. It would need NVLink multicast, which nothing that this package was run on offers."""

from __future__ import annotations

from typing import Any, NoReturn

_REASON = "the mnnvl backend is not built in this version; use trtllm, which serves the GPUs of one host"


def probe(device: str) -> dict[str, Any]:
    return {"device": device, "refusal": _REASON}


def refuse(facts: list[dict[str, Any]], plan: Any) -> str | None:
    return _REASON


def workspace_bytes(plan: Any) -> int:
    return 0


def preflight(plan: Any) -> None:
    raise NotImplementedError(_REASON)


def create(group: Any, plan: Any) -> NoReturn:
    raise NotImplementedError(_REASON)
