"""One rank's part of `generate`: the only module of the command that loads Paddle."""

import argparse
import contextlib
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

from ..config import FusionConfig, ParallelConfig
from ..launch import leave_on_sigterm, wait_for_first_rank
from ..tokenizer import load_tokenizer, token_ids
from .output import answer_only_on_stdout
from .parser import UsageError
from .ranks import quiet_paddle, wrong_input

REPLICAS_APART_S = 86400.0


def generate_on_this_rank(
    args: argparse.Namespace, layout: ParallelConfig, fusion: FusionConfig, model_dir: Path, prompts: Sequence[str]
) -> int:
    """Generates on all ranks alike (every rank calls it with equal arguments); rank 0 writes the answer to stdout.

    With data-parallel replicas each continues its share of the prompts.

    Raises:
        UsageError: the checkpoint, a prompt or the configuration can't be used; the same on every rank.
        FusionError: the run failed; PeerLost when another rank did.
    """
    with answer_only_on_stdout() as answer:
        quiet_paddle()
        import paddle  # noqa: F401  (before the handler, which it would replace)

        leave_on_sigterm()
        wait_for_first_rank()
        document = _generate(args, layout, fusion, model_dir, prompts)
        if document is not None:
            with contextlib.suppress(BrokenPipeError):  # `| head` has read enough
                write_json(document, answer) if args.json else write_text(document, answer)
    return 0


def _generate(
    args: argparse.Namespace, layout: ParallelConfig, fusion: FusionConfig, model_dir: Path, prompts: Sequence[str]
) -> dict[str, Any] | None:
    """What rank 0 writes; None on the other ranks."""
    from fastdeploy_fusion import models

    from ..parallel import Parallel

    begin = time.monotonic()
    with wrong_input():
        tokenizer = load_tokenizer(model_dir)
        config = models.load_config(model_dir)
        ids = encode(tokenizer, prompts, config, args.max_new_tokens)
        params = models.SamplingParams(
            max_new_tokens=args.max_new_tokens,
            temperature=args.temperature,
            top_p=args.top_p,
            seed=args.seed,
            ignore_eos=args.ignore_eos,
        )
    fusion = models.settle_fusion(fusion, config, layout)
    with Parallel.open(layout, fusion, hidden_size=config.hidden_size, dtype=args.dtype) as parallel:
        with wrong_input():
            model = models.load_model(model_dir, parallel, args.dtype)
        loaded = time.monotonic()
        numbers = range(parallel.place.data, len(ids), layout.data_parallel_size)
        own = models.generate(model, parallel, [ids[i] for i in numbers], params, numbers=numbers)
        answers = collect(
            parallel.world, {i: [r.token_ids, r.finish_reason] for i, r in zip(numbers, own, strict=True)}
        )
        seconds = time.monotonic() - loaded
        stats = {
            "num_ranks": layout.world_size,
            "dtype": args.dtype,
            "load_seconds": round(loaded - begin, 4),
            **speed(ids, [tokens for tokens, _ in answers], seconds),
            "sums": sums(parallel),
            "sites": sites(parallel),
            "fusion": str(parallel.tp.explain([1, config.hidden_size])),
            "fusion_decided_by": fusion.decided_by,
        }
        if parallel.world.rank != 0:
            return None
    return {
        "results": [
            {
                "prompt": prompt,
                "prompt_token_ids": list(prompt_ids),
                "token_ids": tokens,
                "text": tokenizer.decode(tokens, skip_special_tokens=False),
                "finish_reason": reason,
            }
            for prompt, prompt_ids, (tokens, reason) in zip(prompts, ids, answers, strict=True)
        ],
        "stats": stats,
    }


def collect(world: Any, own: dict[int, Any]) -> list[Any]:
    """All replicas' answers in the order of the prompts. Collective: nobody leaves while a peer still needs it.

    A replica may have much more to do than another; those that run are watched by their own ranks' time limits.
    """
    answers: dict[int, Any] = {}
    for part in world.channel.exchange(list(own.items()), "collecting the answers", REPLICAS_APART_S):
        answers.update(part)
    return [answers[i] for i in sorted(answers)]


def encode(tokenizer: Any, prompts: Sequence[str], config: Any, max_new_tokens: int) -> list[list[int]]:
    """Token ids of every prompt, no special tokens added.

    Raises:
        UsageError: a prompt has no tokens, one that is none of the model's, or with
            `max_new_tokens` more than its positions.
    """
    limit, ids = config.max_position_embeddings, []
    for number, prompt in enumerate(prompts, 1):
        try:
            tokens = token_ids(tokenizer, prompt, config.vocab_size, add_special_tokens=False)
        except ValueError as error:
            raise UsageError(f"prompt {number}: {error}") from error
        if not tokens:
            raise UsageError(f"prompt {number}, {prompt!r}, has no tokens: every prompt needs at least one")
        if limit is not None and len(tokens) + max_new_tokens > limit:
            raise UsageError(
                f"prompt {number} has {len(tokens)} tokens, with --max-new-tokens {max_new_tokens} more than the "
                f"model's {limit} positions: shorten one of them"
            )
        ids.append(tokens)
    return ids


def speed(prompt_ids: Sequence[Sequence[int]], answers: Sequence[Sequence[int]], seconds: float) -> dict[str, Any]:
    new_tokens = sum(map(len, answers))
    return {
        "prompt_tokens": sum(map(len, prompt_ids)),
        "new_tokens": new_tokens,
        "seconds": round(seconds, 4),
        "tokens_per_second": round(new_tokens / seconds, 2) if seconds > 0 else 0.0,
    }


def write_json(document: dict[str, Any], answer: TextIO) -> None:
    json.dump(document, answer, ensure_ascii=False)
    answer.write("\n")


def sums(parallel: Any) -> list[dict[str, Any]]:
    """How often each operation of rank 0 took which path and why, most frequent first; empty if nothing is added up."""
    if parallel.tp.world_size == 1:
        return []
    return [
        {"op": op, "path": path, "reason": reason, "calls": calls}
        for (op, path, reason), calls in parallel.counters.most_common()
    ]


def sites(parallel: Any) -> list[dict[str, Any]]:
    """The same for each site: the weight prefix of the layer that owed the sum, in the order of the forward."""
    names = ("site", "op", "path", "reason")
    return [{**dict(zip(names, key, strict=True)), "calls": calls} for key, calls in parallel.site_counters.items()]


def write_text(document: dict[str, Any], answer: TextIO) -> None:
    for result in document["results"]:
        answer.write(f"> {result['prompt']}\n{result['text']}\n\n")
    answer.write(closing_line(document["stats"]) + "\n")


def closing_line(stats: dict[str, Any]) -> str:
    ranks = "1 rank" if stats["num_ranks"] == 1 else f"{stats['num_ranks']} ranks"
    served = [f"{s['calls']} {s['op']} {s['path']} ({s['reason']})" for s in stats["sums"]]
    return (
        f"{stats['new_tokens']} tokens in {stats['seconds']:.2f} s, {stats['tokens_per_second']:.1f} tokens/s on "
        f"{ranks}; sums: {', '.join(served) or 'none to reduce'}; {stats['fusion']}"
    )
