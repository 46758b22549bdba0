#!/usr/bin/env python3
"""The server under load, fused against unfused in one run: throughput, latency, and whether anything leaks.

    python tools/bench_serve.py                                # 64 clients, 60 s a side, the tiny GLM4-MoE
    python tools/bench_serve.py --clients 8 --seconds 10       # shorter
    python tools/bench_serve.py --model DIR --plot serve.png

Both servers are up all the time, and the load goes back and forth between them in short blocks, so that both see the
same machine; the one that has none sleeps. Exit code 1 for any error or leak. The clients run on the same cores.
"""

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

SIDES = ("fused", "unfused")
MEMORY_SLACK = 8 << 20  # bytes a rank may grow by in the second half; the first touches the cache's pages
_ROUNDS = 6


def memory_of(server: Any) -> dict[Any, int]:
    """Resident bytes and open files of each process: {rank or "launcher": bytes}."""
    found = {}
    for name, pid in server.pids().items():
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                found[name] = int(line.split()[1]) << 10
    return found


def files_of(server: Any) -> dict[Any, int]:
    return {name: len(os.listdir(f"/proc/{pid}/fd")) for name, pid in server.pids().items()}


def state_of(server: Any) -> dict[str, Any]:
    return {"memory": memory_of(server), "files": files_of(server)}


def wait_drained(server: Any, seconds: float = 10.0) -> dict[str, float]:
    """The queue and the cache of an unloaded server: zero within ``seconds``, or what is left."""
    names = ("fdfusion_requests_running", "fdfusion_requests_waiting", "fdfusion_kv_tokens_used")
    deadline = time.monotonic() + seconds
    while True:
        metrics = server.metrics()
        left = {name: metrics[name] for name in names if metrics[name]}
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.1)


def run(args: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    """Records of both sides, and what is wrong."""
    from tests.servers import FUSED, Server
    from tools.serve_load import Record, load

    records, problems, before = {side: Record() for side in SIDES}, [], {}
    flags = ("--max-num-seqs", args.clients, "--kv-cache-tokens", args.kv_cache_tokens)
    with (
        Server(args.model, *flags, *FUSED, ranks=args.ranks) as fused,
        Server(args.model, *flags, ranks=args.ranks) as unfused,
    ):
        servers = {"fused": fused, "unfused": unfused}
        for server in servers.values():
            load(server.url, server.name, args.clients, 2.0, Record())  # warm up
        rounds = max(1, min(_ROUNDS, int(args.seconds / 2)))
        for number in range(rounds):
            for side in SIDES if number % 2 == 0 else SIDES[::-1]:
                load(servers[side].url, servers[side].name, args.clients, args.seconds / rounds, records[side])
                if number <= (rounds - 1) // 2:
                    before[side] = state_of(servers[side])
        for side, server in servers.items():
            problems += [f"{side}: {error}" for error in records[side].errors[:5]]
            problems += [f"{side}: {name} is {value:g}" for name, value in wait_drained(server).items()]
            problems += check_growth(side, before[side], state_of(server))
            paths = {path for path in ("fused", "plain") if any(f'path="{path}"' in k for k in server.metrics())}
            if args.ranks > 1 and paths != ({"fused"} if side == "fused" else {"plain"}):
                problems.append(f"{side}: its sums took the paths {sorted(paths)}")
        for side, server in servers.items():
            code, _ = server.end()  # raises when a process or shared memory is left
            if code != 0:
                problems.append(f"{side}: exit code {code}: {server.errors()[1][-500:]}")
    return records, problems


def check_growth(side: str, before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    problems = []
    for name, size in after["memory"].items():
        grown = size - before["memory"][name]
        print(f"{side}, rank {name}: {size >> 20} MiB, {grown / (1 << 20):+.1f} MiB in the second half")
        if grown > MEMORY_SLACK:
            problems.append(f"{side}: rank {name} has grown by {grown >> 20} MiB")
    for name, count in after["files"].items():
        if count > before["files"][name] + 2:
            problems.append(f"{side}: rank {name} has {count} files open, before {before['files'][name]}")
    return problems


def table(records: dict[str, Any]) -> str:
    import numpy as np

    rows = ["| | " + " | ".join(SIDES) + " | fused / unfused |", "|---|---|---|---|"]

    def row(name: str, values: list[float], form: str) -> None:
        cells = " | ".join(format(value, form) for value in values)
        rows.append(f"| {name} | {cells} | {values[0] / values[1]:.2f} |")

    sides = [records[side] for side in SIDES]
    row("answers", [len(r.whole) for r in sides], "d")
    row("tokens/s", [r.tokens / r.seconds for r in sides], ".0f")
    for name, attribute in (("first token", "first"), ("between chunks", "gaps"), ("whole answer", "whole")):
        for q in (50, 90, 99):
            row(f"{name}, p{q}, ms", [float(np.percentile(getattr(r, attribute), q)) * 1e3 for r in sides], ".1f")
    rows.append("| errors | " + " | ".join(str(len(r.errors)) for r in sides) + " | |")
    return "\n".join(rows)


def plot(records: dict[str, Any], path: Path, title: str) -> None:
    import matplotlib
    import numpy as np

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(12, 3.6))
    for side in SIDES:
        record = records[side]
        label = f"{side}, {record.tokens / record.seconds:.0f} tokens/s"
        for axis, (name, values) in zip(
            axes,
            (("first token", record.first), ("between chunks", record.gaps), ("whole answer", record.whole)),
            strict=True,
        ):
            ordered = np.sort(values) * 1e3
            axis.plot(ordered, np.arange(1, len(ordered) + 1) / len(ordered), label=label)
            axis.set_xlabel(f"{name}, ms")
            axis.set_xlim(0, float(np.percentile(ordered, 99.5)) * 1.1)
            axis.grid(alpha=0.3)
    axes[0].set_ylabel("share of all")
    axes[0].legend()
    figure.suptitle(title)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    print(f"The plot is {path}.")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(ROOT / "tests" / "data" / "glm4_moe_a"), metavar="DIR")
    parser.add_argument("--clients", type=int, default=64, metavar="N")
    parser.add_argument("--seconds", type=float, default=60.0, metavar="S", help="of load on each side")
    parser.add_argument("--ranks", type=int, default=2, metavar="N")
    parser.add_argument("--kv-cache-tokens", type=int, default=16384, metavar="N")
    parser.add_argument("--plot", type=Path, default=Path("serve.png"), metavar="FILE")
    args = parser.parse_args()
    records, problems = run(args)
    print(f"\n{table(records)}\n")
    plot(records, args.plot, f"{args.clients} clients, {args.seconds:g} s a side, {args.ranks} ranks")
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    print("no error, nothing leaked, queues empty" if not problems else f"{len(problems)} problems")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
