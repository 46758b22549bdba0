"""`fastdeploy-fusion tune`: measures where the fused path pays on this machine, and keeps it for `open()`."""

import argparse
import importlib.util
from pathlib import Path

from .. import tuned
from ..config import BACKENDS, DTYPES, positive_int
from ..launch import started_as_rank
from .parser import UsageError, number_in
from .ranks import check_launcher, on_ranks_of_its_own

NAME = "tune"
HELP = "measure up to how many tokens the fused path pays here; engines then read the table at start-up"
SIDES_HELP = "whose NCCL all-reduce the plain side uses on GPUs"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--tensor-parallel-size",
        type=positive_int,
        default=2,
        metavar="N",
        help="CPU ranks to start here; on GPUs start the command under a launcher (default: %(default)s)",
    )
    parser.add_argument(
        "--hidden", type=positive_int, nargs="+", default=[4096], metavar="N", help="hidden sizes (default: 4096)"
    )
    parser.add_argument(
        "--dtype", choices=DTYPES, nargs="+", help="default: float32 on a CPU, bfloat16 on GPUs", default=None
    )
    parser.add_argument(
        "--pattern", choices=tuned.PATTERNS, nargs="+", default=list(tuned.PATTERNS), help="default: both"
    )
    parser.add_argument(
        "--max-tokens", type=positive_int, default=16384, metavar="N", help="largest count (default: %(default)s)"
    )
    parser.add_argument("--backend", choices=[b for b in BACKENDS if b != "plain"], default="auto")
    parser.add_argument(
        "--mode",
        choices=("eager", "graph"),
        help="of the calls (default: graph on GPUs, as engines decode)",
        default=None,
    )
    parser.add_argument("--collective", choices=("paddle", "torch"), default="paddle", help=SIDES_HELP)
    parser.add_argument(
        "--seconds",
        type=number_in(0, 3600, above_low=True),
        default=3.0,
        metavar="X",
        help="for one token count, where the sides are hard to tell apart (default: %(default)s)",
    )
    parser.add_argument(
        "--output", metavar="FILE", help="the table (default: FDFUSION_TUNED_TABLE, else in the user's cache folder)"
    )
    parser.add_argument("--plot", metavar="FILE", help="draw the curves there (PNG; needs matplotlib)")
    parser.add_argument("--show", metavar="TABLE", help="print and draw a table that is there, and measure nothing")


def run(args: argparse.Namespace, argv: list[str]) -> int:
    """The command in the process of the user or, when a launcher set the world up, in one rank of it.

    Raises:
        UsageError: what can be known to be wrong before Paddle is loaded.
    """
    if args.plot and importlib.util.find_spec("matplotlib") is None:
        raise UsageError("--plot needs matplotlib: pip install matplotlib, or leave --plot out")
    if args.show:
        return _show(args)
    output = output_path(args)
    ranks = args.tensor_parallel_size
    if not started_as_rank() and ranks < 2:
        raise UsageError(f"--tensor-parallel-size is {ranks}: one rank has nothing to add up; use 2 or more")
    if any(word.startswith("--tensor-parallel-size") for word in argv):
        check_launcher(ranks, f"--tensor-parallel-size is {ranks}")
    code = on_ranks_of_its_own(argv, ranks)
    if code is not None:
        return code
    from .tune_rank import tune_on_this_rank

    return tune_on_this_rank(args, output)


def output_path(args: argparse.Namespace) -> Path:
    path = Path(args.output) if args.output else tuned.table_path()
    if path is None:
        raise UsageError("FDFUSION_TUNED_TABLE is off and --output names no file: there is no place for the table")
    if path.is_dir():
        raise UsageError(f"the table's path {path} is a folder: name a file with --output")
    return path


def _show(args: argparse.Namespace) -> int:
    from . import tune_report

    try:
        entries = tuned.read(Path(args.show))
    except (OSError, ValueError) as error:
        raise UsageError(f"--show {args.show}: {error}") from error
    print(tune_report.text(entries))
    if args.plot:
        tune_report.plot(entries, args.plot)
    return 0
