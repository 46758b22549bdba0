"""Sections of verify_gpu.py: streams, graph capture, soak."""

from __future__ import annotations

import time
from typing import Any

import gpu_ranks as ranks
import numpy as np


def case(context: Any, tokens: int, hidden: int, dtype: str, seed: int = 3) -> tuple[Any, ...]:
    """(parts, residual, weight) as numpy, then this rank's three operands on the GPU."""
    import gpu_checks

    parts, residual, weight = gpu_checks.Data(context.group.size, tokens, hidden, seed).cut(tokens, hidden, dtype)
    operands = [ranks.tensor(array, dtype) for array in (parts[context.group.rank], residual, weight)]
    return parts, residual, weight, operands


def right(results: Any, parts: Any, residual: Any, weight: Any, dtype: str) -> bool:
    import gpu_checks

    wanted = gpu_checks.expected(parts, residual, weight)
    errors = [gpu_checks.off(out, want) for out, want in zip(results, wanted, strict=True)]
    return max(errors) <= gpu_checks.TOLERANCE[dtype]


def stream(context: Any) -> None:
    """A launch waits for what Paddle queued before it, on Paddle's stream, whichever that is."""
    import paddle

    hidden, dtype, tokens, big = 4096, "float16", 64, 8192
    parts, residual, weight, operands = case(context, tokens, hidden, dtype)
    eye = ranks.tensor(np.eye(hidden, dtype="float32"), dtype)
    load = [ranks.tensor(np.zeros((big, big), "float32"), dtype) for _ in range(2)]

    def by_matmul() -> Any:
        for _ in range(20):
            paddle.matmul(load[0], load[1])
        return paddle.matmul(operands[0], eye)

    def by_copies() -> Any:
        # Paddle 2.6 leaves cuBLAS on the stream that it was made with, whatever stream_guard says; copies follow it.
        for _ in range(400):
            load[0].clone()
        return operands[0].clone()

    def delayed(fusion: Any, queue: Any = by_matmul) -> Any:
        """The operand is the end of a queue of some 30 ms: read too early, it is not there."""
        return fusion.add_rms_norm(queue(), operands[1], operands[2], 1e-6)

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
                        results = delayed(fusion, by_copies)
                        event = guard.record_event()
                event.synchronize()
                context.check(right(results, parts, residual, weight, dtype), f"wrong result on {name}")
        shown = _wrong_stream_shows(context, fusion, delayed, parts, residual, weight, dtype)
        context.check(shown, "a launch on a wrong stream gives right results too: this check shows nothing")
    context.judge()


def _wrong_stream_shows(context: Any, fusion: Any, delayed: Any, *wanted: Any) -> bool:
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
        wrong += not right(results, *wanted)
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
    from fastdeploy_fusion.backends.flashinfer.yardstick import capture

    _, _, _, operands = case(context, tokens, hidden, dtype)
    fusion.add_rms_norm(*operands, 1e-6)
    captured = capture(lambda: [fusion.add_rms_norm(*operands, 1e-6) for _ in range(3)])
    fusion.freeze()
    reduced = capture(lambda: fusion.all_reduce(operands[0]))
    for seed in (11, 12, 13):
        parts, residual, weight, fresh = case(context, tokens, hidden, dtype, seed)
        with ranks.on_paddle_stream():
            for old, new in zip(operands, fresh, strict=True):
                ranks.torch_view(old).copy_(ranks.torch_view(new))
        captured.replay()
        reduced.replay()
        ranks.synchronize()
        for results in captured.kept:
            good = right(results, parts, residual, weight, dtype)
            context.check(good, f"[{tokens}, {hidden}] {dtype}: wrong after replay with seed {seed}")
        error = np.abs(ranks.values_of(reduced.kept) - np.sum(parts, 0)).max()
        context.check(error < 0.1, f"[{tokens}, {hidden}] {dtype}: all-reduce off by {error} after replay")
    good = right(fusion.add_rms_norm(*operands, 1e-6), parts, residual, weight, dtype)
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


def soak(context: Any) -> None:
    """Many calls of mixed shapes, every result compared on the device with the first of its shape, which is checked."""
    import torch

    hidden, dtype, calls, burst = 4096, "bfloat16", context.args.soak, 20
    counts = (1, 2, 3, 8, 16, 17, 32, 64, 128, 200)
    with context.fusion(hidden, dtype) as fusion:
        cases = [case(context, tokens, hidden, dtype, seed=tokens) for tokens in counts]
        firsts = [fusion.add_rms_norm(*mine[3], 1e-6) for mine in cases]
        for tokens, mine, first in zip(counts, cases, firsts, strict=True):
            context.check(right(first, *mine[:3], dtype), f"{tokens} tokens: the first call is wrong")
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
