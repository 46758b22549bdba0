"""`fastdeploy-fusion doctor`: which fused backends this machine can use, and for each other one why not."""

import argparse
import json
import logging
import tempfile
from pathlib import Path
from typing import Any

from ..config import DTYPES, positive_int
from ..errors import FusionError
from ..launch import leave_on_sigterm, started_as_rank
from . import doctor_text
from .output import answer_only_on_stdout
from .ranks import on_ranks_of_its_own, quiet_paddle

NAME = "doctor"
HELP = "try every fused backend on this machine and say what stands in its way"
_NOTHING_USABLE, _FAILED = 1, 2


class DoctorFailed(FusionError):
    """The examination itself failed; says nothing about the backends."""

    exit_code = _FAILED


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--ranks",
        type=positive_int,
        default=1,
        metavar="N",
        help="ranks to start here (default: %(default)s); under a launcher its ranks are used",
    )
    parser.add_argument("--hidden-size", type=positive_int, default=4096, metavar="N", help="default: %(default)s")
    parser.add_argument("--dtype", choices=DTYPES, help="default: bfloat16 on GPUs, float32 on CPUs")
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of text")
    parser.add_argument("--document-to", metavar="FILE", help=argparse.SUPPRESS)


def run(args: argparse.Namespace, argv: list[str]) -> int:
    """0: a fused backend is usable; 1: none is; 2: the examination failed."""
    if not started_as_rank() and args.ranks > 1:
        return _on_own_ranks(args, argv)
    with answer_only_on_stdout() as answer:
        rank, document = _examine(args)
        if args.document_to:
            if rank == 0:
                Path(args.document_to).write_text(json.dumps(document))
            return 0  # to the launcher an exit code means a lost rank
        if rank == 0:
            answer.write(_shown(document, args.json))
        return _code(document)


def _on_own_ranks(args: argparse.Namespace, argv: list[str]) -> int:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "document.json")
        code = on_ranks_of_its_own([*argv, "--document-to", str(file)], args.ranks)
        if code:
            return code if code > 128 else _FAILED
        document = json.loads(file.read_text())
    with answer_only_on_stdout() as answer:
        answer.write(_shown(document, args.json))
    return _code(document)


def _examine(args: argparse.Namespace) -> tuple[int, dict[str, Any]]:
    """(this rank, the document). Collective over the launch."""
    try:
        quiet_paddle()
        logging.getLogger("fastdeploy_fusion").setLevel("ERROR")  # refusals are the answer here, not news
        from ..diagnosis import diagnose
        from ..groups import init_world

        leave_on_sigterm()
        world = init_world()
        try:
            return world.rank, diagnose(world, args.hidden_size, args.dtype)
        finally:
            world.close()
    except Exception as error:
        raise DoctorFailed(f"the examination failed: {type(error).__name__}: {error}") from error


def _shown(document: dict[str, Any], as_json: bool) -> str:
    return json.dumps(document) + "\n" if as_json else doctor_text.render(document)


def _code(document: dict[str, Any]) -> int:
    return 0 if document["usable"] else _NOTHING_USABLE
