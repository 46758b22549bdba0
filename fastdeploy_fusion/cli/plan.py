"""`fastdeploy-fusion plan`: what a model would fuse on a layout and a device. No GPU, no weights, no ranks."""

import argparse
import dataclasses
import json
from pathlib import Path

from ..config import DTYPES, FusionConfig, add_fusion_args, add_parallel_args, positive_int
from ..hardware import COMPUTE_CAPABILITIES
from .generate import read_layout
from .output import answer_only_on_stdout
from .parser import UsageError
from .ranks import quiet_paddle, wrong_input

NAME = "plan"
HELP = "show every sum of a model, the path it would take and why, from config.json alone"
TOKENS = (1, 16, 64, 256, 1024, 2048, 8192)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", metavar="DIR", help="folder with a config.json, or that file")
    parser.add_argument(
        "--gpu",
        choices=COMPUTE_CAPABILITIES,
        help="plan for this GPU, with a usable FlashInfer (default: the device of this machine)",
    )
    parser.add_argument("--gpus-per-host", type=positive_int, default=8, metavar="N", help="default: %(default)s")
    parser.add_argument(
        "--dtype", choices=DTYPES, help="of activations (default: bfloat16 with --gpu, else float32 as in generate)"
    )
    parser.add_argument(
        "--tokens",
        type=_counts,
        default=TOKENS,
        metavar="N,N,..",
        help="token counts of one forward on a rank (default: " + ",".join(map(str, TOKENS)) + ")",
    )
    parser.add_argument("--all-sites", action="store_true", help="a line for every sum, not one for each kind")
    parser.add_argument("--layer", type=int, metavar="N", help="layer to draw (default: of the most frequent kind)")
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of text")
    add_parallel_args(parser)
    add_fusion_args(parser)


def run(args: argparse.Namespace, argv: list[str]) -> int:
    """Prints the plan that is followed with fusion on, whether or not a flag says so; ``off`` plans without.

    Raises:
        UsageError: the model can't be read, or does not run under the layout.
    """
    layout = read_layout(args)
    config_file = _find_config(args.model)
    with answer_only_on_stdout() as answer:
        quiet_paddle()
        from . import plan_document, plan_text

        with wrong_input():
            document = plan_document.make(
                config_file,
                layout,
                _settings(args),
                gpu=args.gpu,
                gpus_per_host=args.gpus_per_host,
                dtype=args.dtype or ("bfloat16" if args.gpu else "float32"),
                token_counts=args.tokens,
            )
            text = None if args.json else plan_text.render(document, all_sites=args.all_sites, layer=args.layer)
        answer.write(json.dumps(document) + "\n" if text is None else text)
    return 0


def _settings(args: argparse.Namespace) -> FusionConfig:
    off = args.flashinfer_allreduce_fusion == "off"
    return dataclasses.replace(FusionConfig.from_args(args), enabled=not off, auto=False)


def _find_config(model: str | None) -> Path:
    if not model:
        raise UsageError("no model: give --model DIR, a folder with a config.json")
    path = Path(model)
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise UsageError(f"--model {model}: no config.json there")
    return path


def _counts(text: str) -> tuple[int, ...]:
    counts = tuple(sorted({int(part) if part.isdigit() else 0 for part in text.split(",")}))
    if not counts or counts[0] < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of token counts, such as 1,16,256")
    return counts
