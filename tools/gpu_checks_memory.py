"""Sections of verify_gpu.py: memory, and ranks that cannot take part."""

from __future__ import annotations

import os
import time
from typing import Any

import gpu_ranks as ranks
import numpy as np
from gpu_checks_life import case, right


def memory(context: Any) -> None:
    """What is taken is what was predicted, and `close` gives it all back, fifty times over."""
    from fastdeploy_fusion.backends import WorkspacePlan
    from fastdeploy_fusion.backends.flashinfer import driver, workspace_bytes

    group = context.group
    for hidden, dtype, tokens in ((4096, "bfloat16", 2048), (7168, "float16", 1000), (2048, "bfloat16", 7)):
        predicted = workspace_bytes(WorkspacePlan(group.size, hidden, dtype, tokens))
        with context.fusion(hidden, dtype, tokens):
            pass  # pools that the first use fills stay filled
        ranks.synchronize()
        before = driver.free_bytes()
        with context.fusion(hidden, dtype, tokens) as fusion:
            ranks.synchronize()
            taken = before - driver.free_bytes()
            held = context.backend(fusion).held_bytes()
        ranks.synchronize()
        left = before - driver.free_bytes()
        what = f"{tokens} x {hidden} {dtype}"
        ranks.say(group, f"  {what}: predicted {predicted}, held {held}, taken {taken}, left after close {left}")
        context.check(held in (predicted, 0), f"{what}: {held} bytes held, {predicted} predicted")
        # The driver hands out 2 MiB at a time: one such piece may go to the small things of the workspace, and one to
        # torch's pool.
        more = taken - predicted
        context.check(0 <= more <= 4 << 20, f"{what}: {more} bytes more taken than the {predicted} predicted")
        context.check(left == 0, f"{what}: {left} bytes left after close")
    before, began = driver.free_bytes(), time.monotonic()
    for _ in range(context.args.rounds):
        with context.fusion(4096, "bfloat16", 2048):
            pass
    ranks.synchronize()
    lost = before - driver.free_bytes()
    seconds = (time.monotonic() - began) / max(1, context.args.rounds)
    ranks.say(group, f"  {context.args.rounds} rounds of open and close, {seconds:.2f} s each: {lost} bytes lost")
    context.check(lost == 0, f"{lost} bytes lost in {context.args.rounds} rounds")
    context.judge()


def _fill_memory(context: Any, leave: int) -> list[int]:
    """Blocks that leave this many bytes of the GPU free, more or less."""
    from fastdeploy_fusion.backends.flashinfer import driver

    blocks: list[int] = []
    try:
        while (free := driver.free_bytes()) > leave + (32 << 20):
            blocks.append(driver.allocate(min(free - leave, 8 << 30)))
    except driver.DriverError as error:
        context.check(False, f"could not fill the memory: {error}")
    return blocks


def refuse(context: Any) -> None:
    """One rank cannot: all fall back together, say why, and add up right by Paddle's own collective."""
    from fastdeploy_fusion import AllReduceFusion, FusionConfig
    from fastdeploy_fusion.backends.flashinfer import driver

    group, hidden, dtype = context.group, 4096, "float16"
    parts, residual, weight, operands = case(context, 16, hidden, dtype)
    config = FusionConfig(enabled=True, backend="trtllm", num_max_tokens=2048)

    def fallen(name: str) -> None:
        with AllReduceFusion.open(config, group=group, hidden_size=hidden, dtype=dtype) as fusion:
            decision = fusion.explain([16, hidden])
            summed = ranks.values_of(fusion.all_reduce(operands[0]))
        ranks.say(group, f"  {name}: {decision}")
        context.check(decision.path.value == "plain", f"{name}: {decision}")
        context.check("rank 1" in str(decision), f"{name}: the reason does not name the rank: {decision}")
        error = np.abs(summed - np.sum(parts, 0)).max()
        context.check(error < 0.05, f"{name}: the sum is off by {error}")

    for fault in ("probe:1:raise", "preflight:1:raise"):
        os.environ["FDFUSION_FAULT"] = fault
        try:
            fallen(fault)
        finally:
            del os.environ["FDFUSION_FAULT"]
    held = _fill_memory(context, 100 << 20) if group.rank == 1 else []
    group.barrier()
    try:
        fallen("too little memory on rank 1")
    finally:
        for block in held:
            driver.free(block)
    group.barrier()
    with context.fusion(hidden, dtype) as fusion:
        context.check(right(fusion.add_rms_norm(*operands, 1e-6), parts, residual, weight, dtype), "afterwards")
    context.judge()
