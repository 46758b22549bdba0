"""A command on several ranks: start them, or be one of those that a launcher has started; and how a rank behaves."""

import contextlib
import dataclasses
import logging
import os
import sys
import warnings
from collections.abc import Iterator

from .. import env
from ..config import ParallelConfig
from ..launch import started_as_rank
from ..supervise import launch
from .parser import UsageError

_TARGET = "fastdeploy_fusion.cli.main:run_as_rank"


def on_ranks_of_its_own(argv: list[str], num_ranks: int, *, drain_s: float | None = None) -> int | None:
    """The exit code of this command on ``num_ranks`` ranks started for it, or None where this process is to do the
    work: as the only rank, or as one of a launcher's. ``drain_s``: see ``supervise.launch``."""
    if started_as_rank() or num_ranks == 1:
        return None
    return launch(_TARGET, argv, num_ranks, show_traceback=env.flag("FDFUSION_DEBUG"), drain_s=drain_s)


def check_launcher(num_ranks: int, what: str) -> None:
    """Refuse a launcher's number of ranks that is not ``num_ranks``, which ``what`` says in words.

    Raises:
        UsageError: they differ.
    """
    if started_as_rank() and int(os.environ["PADDLE_TRAINERS_NUM"]) != num_ranks:
        world = os.environ["PADDLE_TRAINERS_NUM"]
        raise UsageError(f"a launcher started {world} ranks but {what}: make them equal")


def in_words(layout: ParallelConfig) -> str:
    """``the layout has 4 ranks (--tensor-parallel-size 4)``."""
    sizes = dataclasses.asdict(layout)
    flags = [f"--{name.replace('_', '-')} {size}" for name, size in sizes.items() if size > 1 and size is not True]
    return f"the layout has {layout.world_size} ranks" + (f" ({' '.join(flags)})" if flags else "")


def quiet_paddle() -> None:
    """Before Paddle is imported: no advice on compilers, no log of its stores; our own log goes to stderr."""
    os.environ.setdefault("GLOG_minloglevel", "2")
    warnings.filterwarnings("ignore", message="No ccache found")
    with wrong_input():
        logging.basicConfig(
            level=env.text("FDFUSION_LOG_LEVEL"), stream=sys.stderr, format="%(levelname)s %(name)s: %(message)s"
        )


@contextlib.contextmanager
def wrong_input() -> Iterator[None]:
    """Around what only fails for wrong input: files and values become a UsageError, failures of the run stay."""
    try:
        yield
    except (ValueError, FileNotFoundError, PermissionError) as error:
        if hasattr(error, "exit_code"):
            raise
        raise UsageError(str(error)) from error
