"""`fastdeploy-fusion serve`: an OpenAI-compatible server on ranks that it starts itself."""

import argparse
import importlib.util
import math
from pathlib import Path

from .. import env
from ..config import DTYPES, FusionConfig, add_fusion_args, add_parallel_args, positive_int
from ..serve.settings import ServeSettings
from .generate import find_checkpoint, is_text, read_layout
from .parser import UsageError, number_in, whole_number
from .ranks import check_launcher, in_words, on_ranks_of_its_own

NAME = "serve"
HELP = "serve a Hugging Face checkpoint to OpenAI's clients, on parallel ranks, fused or not"

_NEEDED = ("fastapi", "uvicorn", "jinja2")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    default = ServeSettings()
    parser.add_argument("--model", metavar="DIR", help="checkpoint: config.json, safetensors, tokenizer.json")
    parser.add_argument("--served-model-name", metavar="NAME", help="default: the name of the checkpoint's folder")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="of activations (default: %(default)s)")
    group = parser.add_argument_group("address")
    group.add_argument("--host", default=default.host, help="default: %(default)s, this machine alone")
    group.add_argument("--port", type=whole_number, default=default.port, metavar="N", help="0: a free one")
    group.add_argument("--api-key", metavar="KEY", help="asked of clients; better in FDFUSION_API_KEY, which ps hides")
    group = parser.add_argument_group("limits")
    for name, meaning in (
        ("kv-cache-tokens", "tokens of all sequences together whose keys and values are kept"),
        ("max-num-batched-tokens", "tokens of one forward; longer prompts are read in pieces"),
        ("max-num-seqs", "sequences that run at a time"),
        ("max-body-bytes", "size of a request"),
    ):
        value = getattr(default, name.replace("-", "_"))
        group.add_argument(
            f"--{name}", type=positive_int, default=value, metavar="N", help=f"{meaning} (default: %(default)s)"
        )
    group.add_argument(
        "--max-waiting",
        type=whole_number,
        default=default.max_waiting,
        metavar="N",
        help="requests beyond those that run; more are answered 429 (default: %(default)s)",
    )
    group.add_argument(
        "--drain-seconds",
        type=number_in(0, math.inf),
        default=default.drain_seconds,
        metavar="S",
        help="what requests under way get after SIGTERM (default: %(default)g)",
    )
    add_parallel_args(parser)
    add_fusion_args(parser)


def run(args: argparse.Namespace, argv: list[str]) -> int:
    """The command in the process of the user or, when a launcher set the world up, in one rank of it.

    Raises:
        UsageError: what can be known to be wrong before Paddle is loaded.
    """
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(f"{', '.join(missing)} not installed: pip install '.[serve]' in the checkout")
    model_dir = find_checkpoint(args.model)
    settings = read_settings(args, model_dir)
    layout = read_layout(args)
    if layout.data_parallel_size > 1:
        raise UsageError("serve runs one copy of the model: leave --data-parallel-size at 1 and start a server a copy")
    check_launcher(layout.world_size, in_words(layout))
    code = on_ranks_of_its_own(argv, layout.world_size, drain_s=settings.drain_seconds)
    if code is not None:
        return code
    from .serve_rank import serve_on_this_rank

    return serve_on_this_rank(args.dtype, layout, FusionConfig.from_args(args), model_dir, settings)


def read_settings(args: argparse.Namespace, model_dir: Path) -> ServeSettings:
    name = args.served_model_name or model_dir.resolve().name
    if not is_text(name):
        raise UsageError(f"the model's name {name!r} is not UTF-8: give another --served-model-name")
    try:
        return ServeSettings(
            host=args.host,
            port=args.port,
            kv_cache_tokens=args.kv_cache_tokens,
            max_num_batched_tokens=args.max_num_batched_tokens,
            max_num_seqs=args.max_num_seqs,
            max_waiting=args.max_waiting,
            max_body_bytes=args.max_body_bytes,
            drain_seconds=args.drain_seconds,
            api_key=args.api_key if args.api_key is not None else env.text("FDFUSION_API_KEY") or None,
            model_name=name,
        )
    except ValueError as error:
        raise UsageError(str(error)) from error
