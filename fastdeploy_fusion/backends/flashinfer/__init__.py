"""The `trtllm` backend: FlashInfer's fused all-reduce + residual + RMSNorm kernels on one host's NVIDIA GPUs.

This module is the factory that `backends` lists: probe, refuse, workspace_bytes, preflight, create. This folder is the
only place of the package that imports flashinfer or torch, and it does so inside functions, on first use.
"""

from __future__ import annotations

from typing import Any

from ...errors import WorkspaceError
from . import detect, driver, sizes
from .api import KIND_LEGACY

name = "trtllm"

# Compute capabilities that may run it, by way in. Hopper was run (torch way); Blackwell is FlashInfer's own claim.
ARCHITECTURES = {"torch": (90, 100, 103), "proxy": (90, 100, 103)}
_MARGIN = 64 << 20  # bytes left free beside the workspace: contexts, small pools, the self-test's tensors
OPEN_TIMEOUT_S = 600.0  # FlashInfer compiles its kernels on first use where it has no prebuilt ones
_ALIKE = ("way", "flashinfer", "api", "sm")


def probe(device: str) -> dict[str, Any]:
    """JSON-able facts of this rank; never raises. `refusal` is None, or why this rank cannot run the backend."""
    try:
        return detect.probe_rank(device)
    except Exception as error:
        return {"refusal": f"the probe failed: {type(error).__name__}: {error}"}


def refuse(facts: list[dict[str, Any]], plan: Any) -> str | None:
    """The reason why this group cannot use the backend, or None. Pure: equal on all ranks for equal facts."""
    for rank, fact in enumerate(facts):
        if fact.get("refusal"):
            return f"rank {rank}: {fact['refusal']}"
    reason = sizes.refuse_plan(plan)
    if reason:
        return reason
    for rank, fact in enumerate(facts):
        if fact["sm"] not in ARCHITECTURES[fact["way"]]:
            known = ", ".join(f"SM{sm}" for sm in ARCHITECTURES[fact["way"]])
            return f"rank {rank}: SM{fact['sm']} is not among the architectures for the {fact['way']} way ({known})"
        for key in _ALIKE:
            if fact[key] != facts[0][key]:
                return f"{key} is {facts[0][key]} on rank 0 and {fact[key]} on rank {rank}; all ranks must be alike"
    return _refuse_topology(facts)


def _refuse_topology(facts: list[dict[str, Any]]) -> str | None:
    for rank, fact in enumerate(facts):
        if fact["host"] != facts[0]["host"]:
            return f"rank {rank} is on another host than rank 0; the trtllm backend serves one host"
        for other, peer in enumerate(facts[:rank]):
            if fact["uuid"] == peer["uuid"]:
                return f"ranks {other} and {rank} are on the same GPU"
    for rank, fact in enumerate(facts):
        for other, peer in enumerate(facts):
            if rank == other:
                continue
            if peer["uuid"] not in fact["visible"]:
                return f"rank {rank} does not see rank {other}'s GPU; leave CUDA_VISIBLE_DEVICES the same on all ranks"
            if peer["uuid"] not in fact["peers"]:
                return f"rank {rank}'s GPU cannot map the memory of rank {other}'s (no peer access)"
    return None


def workspace_bytes(plan: Any) -> int:
    """Bytes of GPU memory that a rank's workspace takes, with the FlashInfer that was found (else the newest known)."""
    way = detect.found_way()
    if way is None:
        return sizes.workspace_bytes(plan, wide_float32=True)
    pad = 0 if way.api.kind == KIND_LEGACY else sizes.SIGNAL_PAD
    return sizes.workspace_bytes(plan, way.api.wide_float32, pad)


def preflight(plan: Any) -> None:
    """Raise WorkspaceError with the numbers when this rank's GPU has too little memory for the workspace."""
    from . import paddle_side

    paddle_side.enter_device()
    needed, free = workspace_bytes(plan), driver.free_bytes()
    if free < needed + _MARGIN:
        raise WorkspaceError(
            f"{free / 2**20:.0f} MiB of GPU memory are free and the workspace takes {needed / 2**20:.0f} MiB besides a "
            f"margin of {_MARGIN >> 20}; lower the token limit (now {plan.num_max_tokens})"
        )


def create(group: Any, plan: Any) -> Any:
    """The live backend; collective over the group."""
    from . import live

    way, reason = detect.find_way()
    if way is None:
        raise WorkspaceError(reason)
    return live.create(way, group, plan)
