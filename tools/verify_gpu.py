#!/usr/bin/env python3
"""Is the fused path right on these GPUs? Runs on all ranks of a launch and ends with one line, PASS or FAIL.

    python -m torch.distributed.run --nproc_per_node 2 tools/verify_gpu.py
    python -m paddle.distributed.launch --gpus 0,1 tools/verify_gpu.py --sections matrix,graph

Every result is compared with float64 in numpy. A section that fails is reported and the next one runs; a rank that is
lost ends the run after `--limit` seconds at the latest.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from typing import Any

import gpu_checks
import gpu_ranks as ranks


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = ",".join(gpu_checks.SECTIONS)
    parser.add_argument("--sections", default=names, help=f"comma-separated, in this order; default {names}")
    parser.add_argument("--hidden", default="2048,4096,5120,7168", help="hidden sizes of the matrix")
    parser.add_argument("--dtypes", default="float16,bfloat16")
    parser.add_argument("--tokens", default="1,2,3,16,17,128,2047,2048", help="numbers of tokens of the matrix")
    parser.add_argument("--soak", type=int, default=100_000, help="calls of the soak")
    parser.add_argument("--rounds", type=int, default=50, help="open/close rounds of the memory section")
    parser.add_argument("--limit", type=float, default=280, help="seconds after which every rank ends itself")
    args = parser.parse_args(argv)
    unknown = set(args.sections.split(",")) - set(gpu_checks.SECTIONS)
    if unknown:
        parser.error(f"unknown sections {sorted(unknown)}; there are {names}")
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    group = ranks.start(args.limit)
    ranks.say(group, f"{group.size} ranks,", ", ".join(f"{k} {v}" for k, v in ranks.versions().items()))
    failed = []
    for name in args.sections.split(","):
        began = time.monotonic()
        problem = run_section(group, name, args)
        ranks.say(group, f"[{'FAIL' if problem else 'ok':4}] {name}: {time.monotonic() - began:.1f} s {problem}")
        if problem:
            failed.append(name)
    ranks.say(group, "FAIL: " + ", ".join(failed) if failed else "PASS")
    return 1 if failed else 0


def run_section(group: Any, name: str, args: argparse.Namespace) -> str:
    """ "" or what went wrong on the first rank where something did. All ranks leave together."""
    try:
        gpu_checks.SECTIONS[name](gpu_checks.Context(group, args))
        problem = ""
    except Exception as error:
        lines = traceback.format_exc().strip().splitlines()
        problem = f"{type(error).__name__}: {error} | {' | '.join(line.strip() for line in lines[-5:-1])}"
    problems = group.all_gather_object(problem)
    return next((f"rank {rank}: {text}" for rank, text in enumerate(problems) if text), "")


if __name__ == "__main__":
    sys.exit(main())
