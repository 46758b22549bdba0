"""What this rank has: a GPU, and a FlashInfer that imports."""

from __future__ import annotations

import importlib
from typing import Any


def probe_rank(device: str) -> dict[str, Any]:
    """Facts of this rank; `device` is Paddle's name, such as "cpu" or "gpu:0"."""
    facts: dict[str, Any] = {"device": device, "refusal": None}
    if not device.startswith("gpu"):
        facts["refusal"] = f"Paddle's device here is {device!r}, and FlashInfer's kernels run on NVIDIA GPUs only"
        return facts
    try:
        importlib.import_module("flashinfer.comm")
    except Exception as error:
        facts["refusal"] = f"flashinfer.comm does not import: {type(error).__name__}: {error}"
    return facts
