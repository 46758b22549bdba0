"""Sections of verify_gpu.py: streams, graph capture, memory, refusals, soak."""

from __future__ import annotations

import os
import time
from typing import Any

import gpu_ranks as ranks
import numpy as np


def _case(context: Any, tokens: int, hidden: int, dtype: str, seed: int = 3) -> tuple[Any, ...]:
    """(parts, residual, weight) as numpy, then this rank's three operands on the GPU."""
    import gpu_checks

    parts, residual, weight = gpu_checks.Data(context.group.size, tokens, hidden, seed).cut(tokens, hidden, dtype)
    operands = [ranks.tensor(array, dtype) for array in (parts[context.group.rank], residual, weight)]
    return parts, residual, weight, operands


def _right(results: Any, parts: Any, residual: Any, weight: Any, dtype: str) -> bool:
    import gpu_checks

    wanted = gpu_checks.expected(parts, residual, weight)
    errors = [gpu_checks.off(out, want) for out, want in zip(results, wanted, strict=True)]
    return max(errors) <= gpu_checks.TOLERANCE[dtype]


def stream(context: Any) -> None:
    """A launch waits for what Paddle queued before it, on Paddle's stream, whichever that is."""
    import paddle

    hidden, dtype, tokens, big = 4096, "float16", 64, 8192
    parts, residual, weight, operands = _case(context, tokens, hidden, dtype)
    eye = ranks.tensor(np.eye(hidden, dtype="float32"), dtype)
    load = [ranks.tensor(np.zeros((big, big), "float32"), dtype) for _ in range(2)]

    def delayed(fusion: Any) -> Any:
        """The operand is the end of a queue of some 30 ms of cuBLAS: read too early, it is not there."""
        for _ in range(20):
            paddle.matmul(load[0], load[1])
        partial = paddle.matmul(operands[0], eye)
        return fusion.add_rms_norm(partial, operands[1], operands[2], 1e-6)

    with context.fusion(hidden, dtype) as fusion:
        other = paddle.device.cuda.Stream()
        for name, guard in (("the default stream", None), ("another stream", other)):
            for _ in range(3):
                ranks.synchronize()
                if guard is None:
                    results = delayed(fusion)
                    event = paddle.device.cuda.current_stream().record_event()
                else:
                    with paddle.device.cuda.stream_guard(guard):
                        results = delayed(fusion)
                        event = guard.record_event()
                event.synchronize()
                context.check(_right(results, parts, residual, weight, dtype), f"wrong result on {name}")
        shown = _wrong_stream_shows(context, fusion, delayed, parts, residual, weight, dtype)
        context.check(shown, "a launch on a wrong stream gives right results too: this check shows nothing")
    context.judge()


def _wrong_stream_shows(context: Any, fusion: Any, delayed: Any, *case: Any) -> bool:
    """The same check with launches put on a stream that nothing waits for: it must fail, or it shows nothing."""
    import paddle

    backend = context.backend(fusion)
    route = backend.route
    stray = paddle.device.cuda.Stream()
    backend.use("slots")
    backend._launcher._read_stream = lambda: int(stray.cuda_stream)
    wrong = 0
    for _ in range(3):
        ranks.synchronize()
        # Fresh memory for the operand each time: what an earlier run left there would be right.
        junk = [ranks.tensor(np.full((64, 4096), np.nan, "float32"), "float16") for _ in range(4)]
        del junk
        results = delayed(fusion)
        ranks.synchronize()
        wrong += not _right(results, *case)
    backend.use(route)
    ranks.say(context.group, f"  control: {wrong} of 3 launches on a wrong stream gave wrong results, as they must")
    return wrong > 0


def graph(context: Any) -> None:
    """Captured, replayed on new data; a workspace is not made during a capture, and stays usable after it."""
    hidden = 4096
    for dtype, tokens in (("bfloat16", 1), ("bfloat16", 32), ("float16", 128), ("bfloat16", 2048)):
        with context.fusion(hidden, dtype) as fusion:
            _replay(context, fusion, tokens, hidden, dtype)
    _open_in_capture(context)
    context.judge()


def _replay(context: Any, fusion: Any, tokens: int, hidden: int, dtype: str) -> None:
    _, _, _, operands = _case(context, tokens, hidden, dtype)
    fusion.add_rms_norm(*operands, 1e-6)
    captured = ranks.capture(lambda: [fusion.add_rms_norm(*operands, 1e-6) for _ in range(3)])
    fusion.freeze()
    reduced = ranks.capture(lambda: fusion.all_reduce(operands[0]))
    for seed in (11, 12, 13):
        parts, residual, weight, fresh = _case(context, tokens, hidden, dtype, seed)
        with ranks.on_paddle_stream():
            for old, new in zip(operands, fresh, strict=True):
                ranks.torch_view(old).copy_(ranks.torch_view(new))
        captured.replay()
        reduced.replay()
        ranks.synchronize()
        for results in captured.kept:
            good = _right(results, parts, residual, weight, dtype)
            context.check(good, f"[{tokens}, {hidden}] {dtype}: wrong after replay with seed {seed}")
        error = np.abs(ranks.values_of(reduced.kept) - np.sum(parts, 0)).max()
        context.check(error < 0.1, f"[{tokens}, {hidden}] {dtype}: all-reduce off by {error} after replay")
    good = _right(fusion.add_rms_norm(*operands, 1e-6), parts, residual, weight, dtype)
    context.check(good, f"[{tokens}, {hidden}] {dtype}: wrong in eager mode after the replays")
    ranks.synchronize()
    captured.kept = reduced.kept = None
    captured.reset()
    reduced.reset()


def _open_in_capture(context: Any) -> None:
    import paddle
    from paddle.device.cuda.graphs import CUDAGraph

    from fastdeploy_fusion import AllReduceFusion, FusionConfig
    from fastdeploy_fusion.errors import WorkspaceError

    config = FusionConfig(enabled=True, backend="trtllm")
    graph = CUDAGraph()
    one = ranks.tensor(np.ones((16, 16), "float32"), "float16")
    paddle.matmul(one, one)
    graph.capture_begin()
    try:
        product = paddle.matmul(one, one)
        AllReduceFusion.open(config, group=context.group, hidden_size=2048, dtype="float16")
        context.check(False, "a workspace was made during a capture")
    except WorkspaceError as error:
        ranks.say(context.group, f"  during a capture: {error}")
    finally:
        graph.capture_end()
    del product


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
    parts, residual, weight, operands = _case(context, 16, hidden, dtype)
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
        context.check(_right(fusion.add_rms_norm(*operands, 1e-6), parts, residual, weight, dtype), "afterwards")
    context.judge()


def soak(context: Any) -> None:
    """Many calls of mixed shapes, every result compared on the device with the first of its shape, which is checked."""
    import torch

    hidden, dtype, calls, burst = 4096, "bfloat16", context.args.soak, 20
    counts = (1, 2, 3, 8, 16, 17, 32, 64, 128, 200)
    with context.fusion(hidden, dtype) as fusion:
        cases = [_case(context, tokens, hidden, dtype, seed=tokens) for tokens in counts]
        firsts = [fusion.add_rms_norm(*case[3], 1e-6) for case in cases]
        for tokens, case, first in zip(counts, cases, firsts, strict=True):
            context.check(_right(first, *case[:3], dtype), f"{tokens} tokens: the first call is wrong")
        views = [[ranks.torch_view(out).view(torch.int16) for out in first] for first in firsts]
        bad = torch.zeros((), dtype=torch.int64, device=views[0][0].device)
        order, began, done = np.random.default_rng(5).integers(len(counts), size=(64, burst)), time.monotonic(), 0
        while done < calls:
            row = order[(done // burst) % len(order)]
            results = [fusion.add_rms_norm(*cases[i][3], 1e-6) for i in row]  # back to back
            with ranks.on_paddle_stream():
                for i, result in zip(row, results, strict=True):
                    for out, view in zip(result, views[i], strict=True):
                        bad += (ranks.torch_view(out).view(torch.int16) != view).sum()
            done += burst
            if done % 20_000 < burst:
                ranks.say(context.group, f"  {done} calls, {time.monotonic() - began:.1f} s, {int(bad)} wrong values")
        context.check(int(bad) == 0, f"{int(bad)} values differ from the first call's in {done} calls")
    context.judge()
