"""`fastdeploy-fusion generate`: text from a checkpoint, on ranks that it starts itself."""

import argparse
import json
import math
from pathlib import Path
from typing import Any

from ..config import DTYPES, FusionConfig, ParallelConfig, add_fusion_args, add_parallel_args, positive_int
from .parser import UsageError, number_in, whole_number
from .ranks import check_launcher, in_words, on_ranks_of_its_own

NAME = "generate"
HELP = "generate text from a Hugging Face checkpoint, on parallel ranks, fused or not"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", metavar="DIR", help="checkpoint: config.json, safetensors, tokenizer.json")
    parser.add_argument("--prompt", action="append", default=[], metavar="TEXT", help="may be given several times")
    parser.add_argument("--prompt-file", metavar="FILE", help="one prompt a line, UTF-8; empty lines are skipped")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="of activations (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of text")
    group = parser.add_argument_group("sampling")
    group.add_argument("--max-new-tokens", type=positive_int, default=64, metavar="N", help="default: %(default)s")
    group.add_argument(
        "--temperature", type=number_in(0, math.inf), default=0.0, metavar="X", help="0 is greedy (default)"
    )
    group.add_argument(
        "--top-p", type=number_in(0, 1, above_low=True), default=1.0, metavar="X", help="default: %(default)s"
    )
    group.add_argument("--seed", type=whole_number, metavar="N", help="default: a fresh one")
    group.add_argument("--ignore-eos", action="store_true", help="go on to --max-new-tokens whatever comes")
    add_parallel_args(parser)
    add_fusion_args(parser)


def run(args: argparse.Namespace, argv: list[str]) -> int:
    """The command in the process of the user or, when a launcher set the world up, in one rank of it.

    Raises:
        UsageError: what can be known to be wrong before Paddle is loaded.
    """
    prompts = read_prompts(args)
    model_dir = find_checkpoint(args.model)
    layout = read_layout(args)
    check_launcher(layout.world_size, in_words(layout))
    code = on_ranks_of_its_own(argv, layout.world_size)
    if code is not None:
        return code
    from .generate_rank import generate_on_this_rank

    return generate_on_this_rank(args, layout, FusionConfig.from_args(args), model_dir, prompts)


def read_layout(args: argparse.Namespace) -> ParallelConfig:
    try:
        return ParallelConfig.from_args(args)
    except ValueError as error:
        raise UsageError(str(error)) from error


def read_prompts(args: argparse.Namespace) -> list[str]:
    prompts: list[str] = list(args.prompt)
    if args.prompt_file is not None:
        try:
            lines = Path(args.prompt_file).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"--prompt-file {args.prompt_file}: {_reason(error)}") from error
        prompts += [line for line in lines if line.strip()]
    if not prompts:
        raise UsageError("no prompt: give --prompt TEXT or --prompt-file FILE")
    for number, prompt in enumerate(prompts, 1):
        if not prompt:
            raise UsageError(f"prompt {number} is empty: every prompt needs at least one token")
        if not is_text(prompt):
            raise UsageError(f"prompt {number}, {prompt[:40]!r}, is not UTF-8: give it as text in UTF-8")
    return prompts


def is_text(argument: str) -> bool:
    """False where bytes of the command line were no UTF-8: Python keeps each as half of a surrogate pair."""
    try:
        argument.encode()
    except UnicodeEncodeError:
        return False
    return True


def find_checkpoint(model: str | None) -> Path:
    """The checkpoint's folder, with the files that are looked at first present and readable."""
    if not model:
        raise UsageError("no model: give --model DIR")
    folder = Path(model)
    if not folder.is_dir():
        raise UsageError(f"--model {model}: no such folder")
    for name in ("config.json", "tokenizer.json"):
        try:
            json.loads((folder / name).read_bytes())
        except (OSError, ValueError) as error:
            raise UsageError(f"--model {model}: {name}: {_reason(error)}") from error
    return folder


def _reason(error: Any) -> str:
    return error.strerror if isinstance(error, OSError) and error.strerror else str(error)
