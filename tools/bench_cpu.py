#!/usr/bin/env python3
"""Both sides of the CPU path in one run: fused over shared memory, against Paddle's gloo all-reduce + add + RMSNorm.

    python tools/bench_cpu.py                      # 2 ranks, hidden 4096, 1 8 64 512 tokens
    python tools/bench_cpu.py --generate           # and `generate` on a model made for it, fused and unfused
    python tools/bench_cpu.py --cross-layer        # and one forward of it, with and without sums crossing layers

The sides alternate in blocks of calls within one process set, so that both see the same machine. Medians and 99th
percentiles of the calls of the slowest rank. The gloo side gets Paddle's fastest norm for the processor: its fused
kernel where AVX-512 is there, separate operations elsewhere (the fused kernel ends the process there).
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))


def has_avx512() -> bool:
    return "avx512f" in Path("/proc/cpuinfo").read_text()


def cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")
    return f"{name}, {os.cpu_count()} cores, {'with' if has_avx512() else 'without'} AVX-512"


def gloo_side(paddle: Any, group: Any) -> Any:
    """What a script writes without this library."""
    rms_norm = paddle.incubate.nn.functional.fused_rms_norm

    def step(x: Any, residual: Any, weight: Any, eps: float) -> tuple[Any, Any]:
        total = x.clone()
        paddle.distributed.all_reduce(total, group=group)
        if has_avx512_here:
            return rms_norm(total, weight, None, eps, begin_norm_axis=1, residual=residual)
        total = total + residual
        scale = paddle.rsqrt(paddle.mean(total * total, axis=-1, keepdim=True) + eps)
        return total * scale * weight, total

    has_avx512_here = has_avx512()
    return step


def measure_rank(rank: int, num_ranks: int, token_counts: list[int], hidden: int, budget_s: float) -> list[Any]:
    """Seconds of each call: [tokens][side][call]. Runs on every rank."""
    import numpy as np
    import paddle

    from fastdeploy_fusion import AllReduceFusion, FusionConfig, groups

    world = groups.init_world()
    rng = np.random.default_rng(rank)
    rows: list[Any] = []
    limit = max(token_counts)
    with AllReduceFusion.open(FusionConfig(enabled=True, num_max_tokens=limit), group=world, hidden_size=hidden) as f:
        sides = [gloo_side(paddle, world.paddle_group), f.add_rms_norm]
        core_sets = [set(range(os.cpu_count() or 1)), os.sched_getaffinity(os.getpid())]
        weight = paddle.to_tensor(rng.standard_normal(hidden, np.float32))
        for num_tokens in token_counts:
            x, residual = (paddle.to_tensor(rng.standard_normal((num_tokens, hidden), np.float32)) for _ in range(2))
            times: list[list[float]] = [[], []]
            block = max(2, 64 // num_tokens)
            for side in sides:
                side(x, residual, weight, 1e-5)
            rounds = world.broadcast_object(_rounds(sides, (x, residual, weight, 1e-5), block, budget_s))
            for _ in range(rounds):
                for side, seconds, cores in zip(sides, times, core_sets, strict=True):
                    os.sched_setaffinity(os.getpid(), cores)  # gloo is faster where its threads may go anywhere
                    world.barrier()
                    for _ in range(block):
                        start = time.perf_counter()
                        side(x, residual, weight, 1e-5)
                        seconds.append(time.perf_counter() - start)
            rows.append(times)
        assert {path for _, path, _ in f.counters} == {"fused"}, f.counters
    return rows


def _rounds(sides: list[Any], operands: tuple[Any, ...], block: int, budget_s: float) -> int:
    start = time.perf_counter()
    for side in sides:
        for _ in range(block):
            side(*operands)
    return max(5, min(400, int(budget_s / (time.perf_counter() - start))))


def summarise(per_rank: list[Any], token_counts: list[int]) -> list[dict[str, Any]]:
    import numpy as np

    table = []
    for index, num_tokens in enumerate(token_counts):
        # A call ends when its last rank has the result.
        gloo, shm = (np.max([rank[index][side] for rank in per_rank], axis=0) * 1e6 for side in (0, 1))
        table.append(
            {
                "tokens": num_tokens,
                "calls": len(shm),
                "gloo_median_us": float(np.median(gloo)),
                "gloo_p99_us": float(np.percentile(gloo, 99)),
                "shm_median_us": float(np.median(shm)),
                "shm_p99_us": float(np.percentile(shm, 99)),
                "ratio": float(np.median(gloo) / np.median(shm)),
            }
        )
    return table


def bench_calls(args: argparse.Namespace) -> list[dict[str, Any]]:
    from tests.ranks import run_ranks

    os.chdir(ROOT)
    per_rank = run_ranks(
        args.ranks, "tools.bench_cpu:measure_rank", args.tokens, args.hidden, args.seconds, timeout_s=600
    )
    return summarise(per_rank, args.tokens)


def bench_generate(args: argparse.Namespace) -> dict[str, Any]:
    """Tokens per second of `generate`, unfused and fused by turns, on a model made here."""
    with tempfile.TemporaryDirectory(prefix="bench-model-") as folder:
        subprocess.run([sys.executable, ROOT / "tools/make_checkpoint.py", folder, "--size", args.size], check=True)
        speeds: dict[str, list[float]] = {"unfused": [], "fused": []}
        for _ in range(args.repeats):
            for name, flags in (("unfused", []), ("fused", ["--enable-flashinfer-allreduce-fusion"])):
                speeds[name].append(_generate_speed(folder, args, flags))
    medians = {name: sorted(values)[len(values) // 2] for name, values in speeds.items()}
    return {"size": args.size, "tokens_per_second": speeds, "ratio": medians["fused"] / medians["unfused"]}


def bench_cross_layer(args: argparse.Namespace) -> list[dict[str, Any]]:
    """One decoding forward, by sequences: a layer's last sum reduced in the next layer's norm, or at its own end."""
    from tests.ranks import run_ranks

    os.chdir(ROOT)
    with tempfile.TemporaryDirectory(prefix="bench-model-") as folder:
        subprocess.run([sys.executable, ROOT / "tools/make_checkpoint.py", folder, "--size", args.size], check=True)
        body = "tools.bench_cpu:measure_crossing"
        per_rank = run_ranks(args.ranks, body, folder, args.sequences, args.seconds, timeout_s=600)
    table = []
    for index, num_sequences in enumerate(args.sequences):
        # A forward ends when its last rank has the result.
        slowest = [list(map(max, zip(*(rank[index][side] for rank in per_rank), strict=True))) for side in (0, 1)]
        crossing, ending = (1e3 * sorted(seconds)[len(seconds) // 2] for seconds in slowest)
        row = {"sequences": num_sequences, "calls": len(slowest[0]), "next_norm_ms": crossing, "own_end_ms": ending}
        table.append({**row, "ratio": ending / crossing})
    return table


def measure_crossing(rank: int, num_ranks: int, folder: str, counts: list[int], budget_s: float) -> list[Any]:
    """Seconds of each forward: [sequences][side][call]; the sides alternate. Runs on every rank."""
    import numpy as np
    import paddle

    from fastdeploy_fusion import AllReduceFusion, FusionConfig, groups, models
    from fastdeploy_fusion.layers import PackedBatch

    world, config, rows = groups.init_world(), models.load_config(folder), []
    with AllReduceFusion.open(FusionConfig(enabled=True), group=world, hidden_size=config.hidden_size) as fusion:
        model = models.load_model(folder, fusion, progress=False)
        for count in counts:
            tokens, cache = paddle.to_tensor(np.arange(count)), model.new_cache(count, 64)
            batch = PackedBatch(tuple(range(count)), (32,) * count, (1,) * count)
            times: list[list[float]] = [[], []]
            until, done = time.perf_counter() + budget_s, False
            while not done:
                for crosses, seconds in zip((True, False), times, strict=True):
                    for layer in model.layers:
                        layer.crosses = crosses
                    world.barrier()
                    start = time.perf_counter()
                    model.logits(model(tokens, batch, cache))
                    seconds.append(time.perf_counter() - start)
                done = world.broadcast_object(len(times[0]) > 5 and time.perf_counter() > until)
            rows.append([seconds[2:] for seconds in times])
        assert {path for _, path, _ in fusion.counters} == {"fused"}, fusion.counters
    return rows


def _generate_speed(folder: str, args: argparse.Namespace, flags: list[str]) -> float:
    command = [
        sys.executable, "-m", "fastdeploy_fusion", "generate", "--model", folder, "--json", "--ignore-eos",
        "--prompt", "The workspace is created before", "--max-new-tokens", str(args.new_tokens),
        "--tensor-parallel-size", str(args.ranks), *flags,
    ]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    if done.returncode != 0:
        raise RuntimeError(f"generate ended with {done.returncode}:\n{done.stderr[-3000:]}")
    return float(json.loads(done.stdout)["stats"]["tokens_per_second"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 64, 512])
    parser.add_argument("--seconds", type=float, default=6.0, help="for one token count (default: %(default)s)")
    parser.add_argument("--generate", action="store_true", help="also measure the command line's tokens per second")
    parser.add_argument("--cross-layer", action="store_true", help="also measure sums that cross into the next layer")
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 4, 16], help="of --cross-layer's forwards")
    parser.add_argument("--size", default="bench", help="of the model made for it (tools/make_checkpoint.py)")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    args = parser.parse_args()
    report: dict[str, Any] = {"cpu": cpu_name(), "ranks": args.ranks, "hidden": args.hidden}
    print(f"{report['cpu']}; {args.ranks} ranks, float32, hidden {args.hidden}; microseconds a call")
    print(f"{'tokens':>6} {'gloo+add+norm':>14} {'p99':>8} {'shm fused':>10} {'p99':>8} {'faster':>7} {'calls':>6}")
    report["calls"] = bench_calls(args)
    for row in report["calls"]:
        print(
            f"{row['tokens']:>6} {row['gloo_median_us']:>14.0f} {row['gloo_p99_us']:>8.0f} "
            f"{row['shm_median_us']:>10.0f} {row['shm_p99_us']:>8.0f} {row['ratio']:>6.1f}x {row['calls']:>6}"
        )
    if args.generate:
        report["generate"] = bench_generate(args)
        speeds = {name: sorted(v)[len(v) // 2] for name, v in report["generate"]["tokens_per_second"].items()}
        print(
            f"generate, model '{args.size}', {args.ranks} ranks, {args.new_tokens} tokens: "
            f"unfused {speeds['unfused']:.1f}, fused {speeds['fused']:.1f} tokens/s "
            f"({report['generate']['ratio']:.2f}x; medians of {args.repeats})"
        )
    if args.cross_layer:
        report["cross_layer"] = bench_cross_layer(args)
        print(f"one decoding forward, model '{args.size}', fused; milliseconds")
        print(f"{'sequences':>9} {'summed at layer end':>20} {'in next norm':>13} {'faster':>7} {'calls':>6}")
        for row in report["cross_layer"]:
            print(
                f"{row['sequences']:>9} {row['own_end_ms']:>20.2f} {row['next_norm_ms']:>13.2f} "
                f"{row['ratio']:>6.2f}x {row['calls']:>6}"
            )
    if args.json:
        args.json.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
