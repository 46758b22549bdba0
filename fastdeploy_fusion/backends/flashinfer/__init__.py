"""The `trtllm` backend: FlashInfer's fused all-reduce + residual + RMSNorm kernels on one host's NVIDIA GPUs.

This module is the factory that `backends` lists: probe, refuse, workspace_bytes, preflight, create. This folder is the
only place of the package that imports flashinfer or torch, and it does so inside functions, on first use.
"""

from __future__ import annotations

from typing import Any

from .detect import probe_rank

name = "trtllm"


def probe(device: str) -> dict[str, Any]:
    """JSON-able facts of this rank; never raises. `refusal` is None, or why this rank cannot run the backend."""
    try:
        return probe_rank(device)
    except Exception as error:
        return {"refusal": f"the probe failed: {type(error).__name__}: {error}"}


def refuse(facts: list[dict[str, Any]], plan: Any) -> str | None:
    """The reason why this group cannot use the backend, or None. Pure: equal on all ranks for equal facts."""
    for rank, fact in enumerate(facts):
        if fact.get("refusal"):
            return f"rank {rank}: {fact['refusal']}"
    return "the FlashInfer kernels are not bound in this version"


def workspace_bytes(plan: Any) -> int:
    """Bytes of GPU memory that a rank's workspace takes."""
    raise NotImplementedError("no workspace in this version")


def preflight(plan: Any) -> None:
    """Raise with the reason when this rank's GPU has too little memory for the workspace."""
    raise NotImplementedError("no workspace in this version")


def create(group: Any, plan: Any) -> Any:
    """The live backend; collective over the group."""
    raise NotImplementedError("refuse() never lets a group come here in this version")
