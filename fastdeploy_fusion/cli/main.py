"""From argv to an exit code: 0 done, 1 a run failed, 2 wrong input, 128+N ended by signal N."""

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from .. import env
from ..launch import error_message
from . import doctor, generate, plan, serve, tune
from .parser import Parser, parse

# Modules with NAME, HELP, add_arguments(parser) and run(args, argv) -> exit code.
COMMANDS = (doctor, plan, generate, serve, tune)


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        import importlib.metadata  # takes longer than all else here

        sys.stdout.write(f"{parser.prog} {importlib.metadata.version('fastdeploy-fusion')}\n")
        parser.exit()


def build_parser() -> Parser:
    parser = Parser(prog="fastdeploy-fusion", description="Fused all-reduce + residual + RMSNorm for Paddle.")
    parser.add_argument("--version", action=_Version, nargs=0, help="show the installed version and exit")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for module in COMMANDS:
        command = commands.add_parser(module.NAME, help=module.HELP, description=module.HELP)
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    return parser


def run_as_rank(argv: Sequence[str]) -> int:
    """One rank of a command that `supervise.launch` started; errors go up, to be reported to the launcher."""
    arguments = list(argv)
    args = parse(build_parser(), arguments)
    code: int = args.run(args, arguments)
    return code


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command (`argv` without the program's name; default: the process's own). Returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        return run_as_rank(arguments)
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        if env.flag("FDFUSION_DEBUG"):
            raise
        sys.stderr.write(f"error: {error_message(error)}\n")
        return getattr(error, "exit_code", 1)
