#!/usr/bin/env python3
"""How fast is the fused path on these GPUs, beside everything one would use instead? All in one run, on equal tensors.

    python -m torch.distributed.run --nproc_per_node 2 tools/bench_fusion.py --tokens 1,32,512 --hidden 4096

graph: microseconds a call inside a Paddle CUDA graph. eager: microseconds a call with the GPU kept busy. host: what one
call costs the calling thread. Medians over repeats, the slowest rank's. Needs torch and FlashInfer beside Paddle.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

import gpu_contenders
import gpu_ranks as ranks

from fastdeploy_fusion.config import DTYPES

MODES = ("graph", "eager", "host")


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = ",".join(gpu_contenders.NAMES)
    parser.add_argument("--tokens", default="1,4,16,32,64,128,256,512,1024,2048")
    parser.add_argument("--hidden", default="4096")
    parser.add_argument("--dtype", default="bfloat16", choices=sorted(DTYPES))
    parser.add_argument("--what", default=names, help=f"comma-separated contenders; default {names}")
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--calls", type=int, default=100, help="calls between two looks at the clock")
    parser.add_argument("--collective", default="torch", choices=("torch", "paddle"), help="whose NCCL all-reduce")
    parser.add_argument("--json", metavar="FILE", help="write the results there")
    parser.add_argument("--plot", metavar="FILE", help="draw the graph mode there (PNG; needs matplotlib)")
    parser.add_argument("--from-json", metavar="FILE", help="draw an earlier run's results instead of running")
    parser.add_argument("--limit", type=float, default=280, help="seconds after which every rank ends itself")
    args = parser.parse_args(argv)
    if args.from_json and not args.plot:
        parser.error("--from-json needs --plot FILE")
    for given, known in ((args.what, gpu_contenders.NAMES), (args.modes, MODES)):
        if unknown := set(given.split(",")) - set(known):
            parser.error(f"unknown: {sorted(unknown)}; there are {', '.join(known)}")
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    if args.from_json:
        with open(args.from_json) as file:
            plot(json.load(file)["rows"], args.plot)
        return 0
    group = ranks.start(args.limit)
    found = {"versions": ranks.versions(), "ranks": group.size, "dtype": args.dtype, "repeats": args.repeats}
    ranks.say(group, json.dumps(found))
    rows: list[dict[str, Any]] = []
    for hidden in (int(text) for text in args.hidden.split(",")):
        rows += bench_hidden(group, hidden, args)
        if group.rank == 0 and args.json:
            with open(args.json, "w") as file:
                json.dump({**found, "date": time.strftime("%Y-%m-%d"), "rows": rows}, file, indent=1)
    if group.rank == 0 and args.plot:
        plot(rows, args.plot)
    ranks.say(group, "done")
    return 0


def bench_hidden(group: Any, hidden: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Results of one hidden size, printed line by line as they come."""
    from fastdeploy_fusion import AllReduceFusion, FusionConfig

    counts = [int(text) for text in args.tokens.split(",")]
    config = FusionConfig(enabled=True, backend="trtllm", num_max_tokens=max(counts))
    rows = []
    with AllReduceFusion.open(config, group=group, hidden_size=hidden, dtype=args.dtype) as fusion:
        decision = fusion.explain([1, hidden])
        backend = ranks.live_backend(fusion)
        ranks.say(group, f"hidden {hidden}: {decision}, route {backend.route} {backend.route_reason}")
        for mode in args.modes.split(","):
            names = [name for name in args.what.split(",") if mode in gpu_contenders.MODES_OF[name]]
            ranks.say(group, f"\n{mode}, us a call\n{'tokens':>7}" + "".join(f"{name:>15}" for name in names))
            for tokens in counts:
                contenders = gpu_contenders.make(group, fusion, tokens, hidden, args)
                row = {"mode": mode, "hidden": hidden, "tokens": tokens}
                for name in names:
                    row[name] = measure(group, contenders[name], mode, args, tokens * hidden)
                rows.append(row)
                ranks.say(group, f"{tokens:7}" + "".join(f"{_text(row[name]):>15}" for name in names))
    return rows


def _text(value: Any) -> str:
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def measure(group: Any, run: Any, mode: str, args: argparse.Namespace, numel: int) -> float | str:
    """Microseconds a call, or why not. An exception is one that all ranks meet (nothing is launched by then)."""
    from fastdeploy_fusion.backends.flashinfer.yardstick import capture

    try:
        for _ in range(3):
            run()
        ranks.synchronize()
        if mode == "host":
            return ranks.host_timed(group, run, min(args.calls, 50), args.repeats)
        if mode == "eager":
            return ranks.timed(group, run, args.calls, args.repeats)
        calls = 20 if numel < 1 << 22 else 5
        graph = capture(lambda: [run() for _ in range(calls)][-1])
        try:
            replays = max(1, args.calls // calls)
            return ranks.timed(group, graph.replay, replays, args.repeats) / calls
        finally:
            ranks.synchronize()
            graph.kept = None
            graph.reset()
    except Exception as error:
        ranks.say(group, f"        {type(error).__name__}: {str(error)[:300]}")
        return "n/a"


def plot(rows: list[dict[str, Any]], path: str) -> None:
    """Microseconds against tokens in a graph, one panel a hidden size."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [row for row in rows if row["mode"] == "graph"]
    sizes = sorted({row["hidden"] for row in rows})
    figure, axes = pyplot.subplots(1, len(sizes), figsize=(6 * len(sizes), 4.5), squeeze=False)
    for axis, hidden in zip(axes[0], sizes, strict=True):
        mine = [row for row in rows if row["hidden"] == hidden]
        for name in gpu_contenders.NAMES:
            points = [(row["tokens"], row[name]) for row in mine if isinstance(row.get(name), float)]
            if points:
                axis.plot(*zip(*points, strict=True), marker="o", markersize=3, label=gpu_contenders.LABELS[name])
        axis.set(xscale="log", yscale="log", xlabel="tokens", ylabel="us a call, in a CUDA graph")
        axis.set_title(f"hidden {hidden}")
        axis.grid(True, which="both", alpha=0.3)
        axis.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    sys.exit(main())
