"""Arithmetic of the FlashInfer trtllm workspace and launch, from its sources (0.4.1 to 0.7.4). Pure."""

from __future__ import annotations

from typing import Any

from ...policy import ITEMSIZE

WORLD_SIZES = (2, 4, 8, 16)
ACCESS_BYTES = 16  # a thread moves 16 bytes at a time
GRANULE = 1 << 21  # physical GPU memory comes in pieces of 2 MiB
SIGNAL_PAD = 2048  # added to every buffer of symmetric memory, used or not
BARRIER_FLAGS = 256
CONTROL_FLAG_BYTES = 5 * 4
# The kernel computes `2 * comm_size` in a 32-bit int (the buffer that it clears), so that comm_size must stay below
# 2**30 for an address inside the buffer; FlashInfer itself only caps it at 2**31.
COMM_LIMIT = 1 << 30
# FlashInfer's own table, in MiB of 2 * world_size * tokens * hidden * item bytes: above it, two-shot. Two ranks never
# gain by two-shot (measured on 2 x H200 at every size) and have no entry; 16 ranks are not in FlashInfer's.
ONESHOT_MIB = {4: 64, 8: 42, 16: 42}


def round_up(value: int, unit: int) -> int:
    return (value + unit - 1) // unit * unit


def comm_bytes(plan: Any) -> int:
    """Bytes of one of the three rotating one-shot buffers: what every rank pushes to this one in one call."""
    return plan.world_size * plan.num_max_tokens * plan.hidden_size * ITEMSIZE[plan.dtype]


def buffer_bytes(plan: Any, wide_float32: bool = False) -> tuple[int, int, int]:
    """Requested bytes of (two-shot buffer, barrier flags, one-shot buffers). `wide_float32`: FlashInfer >= 0.7."""
    item = 4 if plan.dtype == "float32" and wide_float32 else 2
    two_shot = plan.world_size * plan.num_max_tokens * plan.hidden_size * item
    return two_shot, plan.world_size * BARRIER_FLAGS * 4, 3 * comm_bytes(plan)


def workspace_bytes(plan: Any, wide_float32: bool = False, pad: int = SIGNAL_PAD) -> int:
    """Bytes of GPU memory that one rank's workspace takes: physical memory of the three buffers, in whole granules.

    pad: SIGNAL_PAD for symmetric memory (the unified API), 0 for CUDA IPC (the legacy one). The control flag and the
    pointer tables (less than 1 KiB) live in the small-allocation pools of the CUDA driver and of the frameworks.
    """
    return sum(round_up(round_up(size, 16) + pad, GRANULE) for size in buffer_bytes(plan, wide_float32))


def max_tokens(plan: Any) -> int:
    """The largest num_max_tokens that this backend accepts for the plan's other values."""
    return (COMM_LIMIT - 1) // (plan.world_size * plan.hidden_size * ITEMSIZE[plan.dtype])


def block_threads(hidden_size: int, dtype: str) -> int:
    """Threads of a block that the launcher starts from; it fails above 1024."""
    threads = hidden_size * ITEMSIZE[dtype] // ACCESS_BYTES
    cluster = 8
    while threads % cluster and cluster > 1:
        cluster //= 2
    block = threads // cluster
    while block < 128 and cluster >= 2:
        block, cluster = block * 2, cluster // 2
    return block


def use_oneshot(tokens: int, hidden_size: int, dtype: str, world_size: int) -> bool:
    """One-shot or two-shot, by the shape alone, so that all ranks choose alike.

    Two-shot only where FlashInfer's table says so and there are more tokens than ranks (it has no kernel below).
    """
    limit = ONESHOT_MIB.get(world_size)
    if limit is None or tokens <= world_size:
        return True
    return 2 * world_size * tokens * hidden_size * ITEMSIZE[dtype] <= limit << 20


def refuse_plan(plan: Any) -> str | None:
    """Why the kernels cannot serve this plan anywhere, or None."""
    if plan.world_size not in WORLD_SIZES:
        return f"{plan.world_size} ranks: FlashInfer's kernels are built for {WORLD_SIZES} ranks"
    if plan.dtype not in ITEMSIZE:
        return f"dtype {plan.dtype!r}: FlashInfer's kernels take {', '.join(ITEMSIZE)}"
    unit = ACCESS_BYTES // ITEMSIZE[plan.dtype]
    if plan.hidden_size <= 0 or plan.hidden_size % unit:
        return f"hidden size {plan.hidden_size}: must be a multiple of {unit} (16 bytes of {plan.dtype})"
    if block_threads(plan.hidden_size, plan.dtype) > 1024:
        return f"hidden size {plan.hidden_size}: has no split into blocks of 1024 threads or fewer"
    if plan.num_max_tokens < 1:
        return f"num_max_tokens {plan.num_max_tokens}: must be at least 1"
    if comm_bytes(plan) >= COMM_LIMIT:
        return (
            f"num_max_tokens {plan.num_max_tokens}: one-shot buffers of 1 GiB and more overflow an int in FlashInfer's "
            f"kernel; set it to at most {max_tokens(plan)}"
        )
    return None
