"""One rank's part of `tune`: it loads Paddle and measures."""

import argparse
import contextlib
from pathlib import Path

from .. import tuned
from ..launch import leave_on_sigterm, wait_for_first_rank
from . import tune_report
from .output import answer_only_on_stdout
from .parser import UsageError
from .ranks import quiet_paddle


def tune_on_this_rank(args: argparse.Namespace, output: Path) -> int:
    """Measures on all ranks alike; rank 0 writes the table and the plot, and prints the regret to stdout.

    Raises:
        UsageError: the table can't be written; on every rank.
        FusionError: there is nothing to tune here, or a rank was lost.
    """
    with answer_only_on_stdout() as answer:
        quiet_paddle()
        import paddle

        from ..groups import init_world
        from ..tuning.tuner import Plan, tune

        leave_on_sigterm()
        wait_for_first_rank()
        group = init_world()
        on_gpu = str(paddle.device.get_device()).startswith("gpu")
        if args.mode == "graph" and not on_gpu:
            raise UsageError("--mode graph captures CUDA graphs, and Paddle's device here is the CPU: leave it out")
        plan = Plan(
            hidden_sizes=tuple(args.hidden),
            dtypes=tuple(args.dtype or (["bfloat16"] if on_gpu else ["float32"])),
            patterns=tuple(args.pattern),
            max_tokens=args.max_tokens,
            backend=args.backend,
            mode=args.mode or ("graph" if on_gpu else "eager"),
            collective=args.collective,
            budget_s=args.seconds,
        )
        try:
            entries = tune(group, plan)
            failure = _keep(entries, output) if group.rank == 0 else None
            failure = group.broadcast_object(failure)  # also: nobody leaves while a peer still needs it
        finally:
            group.close()
        if failure is not None:
            raise UsageError(failure)
        if group.rank == 0:
            if args.plot:
                tune_report.plot(entries, args.plot)
            with contextlib.suppress(BrokenPipeError):
                answer.write(f"{tune_report.text(entries)}\n\nThe table is {output}.\n")
    return 0


def _keep(entries: list[tuned.Entry], output: Path) -> str | None:
    try:
        tuned.write(output, entries)
    except OSError as error:
        return f"the table {output} can't be written: {error.strerror or error}"
    return None
