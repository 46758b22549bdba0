"""For people: versions of FlashInfer's parts, where it keeps what it compiles, what the driver says of the GPU."""

from __future__ import annotations

import importlib.metadata
import os
import sys
from pathlib import Path
from typing import Any

from . import detect, driver

DISTRIBUTIONS = (
    "flashinfer-python",
    detect.FORK,
    "flashinfer-cubin",
    "flashinfer-jit-cache",
    "apache-tvm-ffi",
    "torch",
    "nvidia-nccl-cu12",
    "nvidia-nccl-cu13",
)


def versions() -> dict[str, str | None]:
    """Of each distribution, None where it is not installed; nothing is imported."""
    found: dict[str, str | None] = {}
    for name in DISTRIBUTIONS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def cache_path() -> str:
    """The folder of compiled kernels: what an imported FlashInfer says, else its default."""
    module = sys.modules.get("flashinfer.jit.env")
    folder = getattr(module, "FLASHINFER_WORKSPACE_DIR", None)
    if folder is None:
        folder = Path(os.environ.get("FLASHINFER_WORKSPACE_BASE") or Path.home()) / ".cache" / "flashinfer"
    return str(folder)


def gpu(device: str) -> dict[str, Any] | None:
    """Name, memory and driver of Paddle's device; None on a CPU, an ``error`` where the driver fails."""
    if not device.startswith("gpu"):
        return None
    try:
        return driver.describe(int(device.partition(":")[2] or 0))
    except driver.DriverError as error:
        return {"error": str(error)}
