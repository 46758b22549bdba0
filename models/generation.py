"""Generation: packed prefill of all prompts, then decoding of all running sequences together."""

import secrets
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import paddle

from fastdeploy_fusion.layers import PackedBatch, ops
from fastdeploy_fusion.layers.pipeline import share_last
from fastdeploy_fusion.parallel import Parallel, as_parallel

from .sampling import Sampler, SamplingParams

if TYPE_CHECKING:
    from fastdeploy_fusion.fusion import AllReduceFusion


@dataclass(frozen=True)
class Result:
    """One prompt's answer. ``token_ids`` end before an eos token; ``finish_reason`` is "stop" or "length"."""

    prompt_token_ids: list[int]
    token_ids: list[int]
    finish_reason: str


@dataclass
class _Sequence:
    slot: int
    sampler: Sampler
    prompt: list[int]
    pending: list[int] = field(default_factory=list)
    num_cached: int = 0
    generated: list[int] = field(default_factory=list)
    finish_reason: str | None = None


def generate(
    model: Any,
    ranks: "Parallel | AllReduceFusion",
    prompts: Sequence[Sequence[int]],
    params: SamplingParams | None = None,
    *,
    max_tokens_per_step: int | None = None,
    numbers: Sequence[int] | None = None,
) -> list[Result]:
    """Continue every prompt (token ids). Collective: all ranks of a replica give and get the same.

    All prompts run together; ``max_tokens_per_step`` bounds the tokens of one forward, so that long prompts are read in
    pieces. Tokens are the same on every rank by construction: ranks of a tensor-parallel group choose from logits that
    are the same bytes, and all others are told.

    Args:
        ranks: what the model was loaded with.
        numbers: of the prompts, to draw their random numbers by, where they are part of a longer list; else from 0 on.
    """
    parallel = as_parallel(ranks)
    params = params or SamplingParams()
    _check_prompts(model, prompts, params.max_new_tokens)
    if max_tokens_per_step is not None and max_tokens_per_step < 1:
        raise ValueError(f"max_tokens_per_step is {max_tokens_per_step}; it must be at least 1, or None for no limit")
    alike = [[list(prompt) for prompt in prompts], asdict(params), max_tokens_per_step]
    parallel.replica.check_equal(alike, "generate")
    seed = params.seed if params.seed is not None else parallel.replica.broadcast_object(secrets.randbits(32))
    numbers = range(len(prompts)) if numbers is None else numbers
    sequences = [
        _Sequence(slot=i, sampler=Sampler(params, seed, number), prompt=list(prompt), pending=list(prompt))
        for i, (number, prompt) in enumerate(zip(numbers, prompts, strict=True))
    ]
    if sequences:
        longest = max(len(prompt) for prompt in prompts) + params.max_new_tokens
        cache = model.new_cache(len(sequences), longest)
        eos = frozenset() if params.ignore_eos else frozenset(model.config.eos_token_ids)
        while running := [s for s in sequences if s.finish_reason is None]:
            _step(model, parallel, cache, running, params.max_new_tokens, eos, max_tokens_per_step)
    return [Result(s.prompt, s.generated, s.finish_reason or "length") for s in sequences]


def prompt_logits(
    model: Any, prompts: Sequence[Sequence[int]], *, packed: bool = True, max_tokens_per_step: int | None = None
) -> list[np.ndarray]:
    """Logits of every position: float32 ``[len(prompt), vocab_size]`` a prompt, on all ranks. Collective.

    ``packed`` runs all prompts in one batch, else one after the other; ``max_tokens_per_step`` 1 goes token by token.
    """
    _check_prompts(model, prompts, 0)
    if not packed:
        one_by_one = [prompt_logits(model, [p], max_tokens_per_step=max_tokens_per_step) for p in prompts]
        return [logits for (logits,) in one_by_one]
    cache = model.new_cache(len(prompts), max(len(prompt) for prompt in prompts))
    pending = [(slot, 0, list(prompt)) for slot, prompt in enumerate(prompts)]
    pieces: list[list[np.ndarray]] = [[] for _ in prompts]
    while pending:
        taken = _fit(pending, max_tokens_per_step)
        batch, hidden = _forward(model, cache, taken)
        logits = None if hidden is None else model.logits(hidden)
        shape = [batch.num_tokens, model.config.vocab_size]
        logits = share_last(model.parallel.pipeline, logits, shape, "float32").numpy()
        for (slot, _, _), rows in zip(taken, np.split(logits, batch.ends[:-1]), strict=True):
            pieces[slot].append(rows)
        done = {slot: len(tokens) for slot, _, tokens in taken}
        moved = [(slot, count + done.get(slot, 0), tokens[done.get(slot, 0) :]) for slot, count, tokens in pending]
        pending = [entry for entry in moved if entry[2]]
    return [np.concatenate(rows) for rows in pieces]


def _step(
    model: Any,
    parallel: Parallel,
    cache: Any,
    running: list[_Sequence],
    max_new_tokens: int,
    eos: frozenset[int],
    limit: int | None,
) -> None:
    """One forward: next tokens of sequences that decode, and as much of the prompts as fits; then choose tokens."""
    by_slot = {s.slot: s for s in running}
    # Sequences that decode come first, so that a limit delays new prompts and not running answers.
    order = sorted(running, key=lambda s: (not s.generated, s.slot))
    taken = _fit([(s.slot, s.num_cached, s.pending) for s in order], limit)
    batch, hidden = _forward(model, cache, taken)
    last_rows, deciding = [], []
    for (slot, _, tokens), end in zip(taken, batch.ends, strict=True):
        sequence = by_slot[slot]
        sequence.num_cached += len(tokens)
        sequence.pending = sequence.pending[len(tokens) :]
        if not sequence.pending:
            last_rows.append(end - 1)
            deciding.append(sequence)
    if not deciding:
        return
    chosen = None if hidden is None else _choose(model, hidden, last_rows, deciding)
    for sequence, token in zip(deciding, parallel.from_last_stage(chosen), strict=True):
        _accept(sequence, token, max_new_tokens, eos)


def _choose(model: Any, hidden: Any, rows: list[int], deciding: list[_Sequence]) -> list[int]:
    """A token for each sequence, from its row of ``hidden``."""
    if len(rows) < hidden.shape[0]:
        hidden = paddle.gather(hidden, ops.tensor_of(rows, hidden.place))
    logits = model.logits(hidden).numpy()
    return [sequence.sampler.choose(row) for sequence, row in zip(deciding, logits, strict=True)]


def _accept(sequence: _Sequence, token: int, max_new_tokens: int, eos: frozenset[int]) -> None:
    if token in eos:
        sequence.finish_reason = "stop"
        return
    sequence.generated.append(token)
    sequence.pending = [token]
    if len(sequence.generated) == max_new_tokens:
        sequence.finish_reason = "length"


def _fit(pending: list[tuple[int, int, list[int]]], limit: int | None) -> list[tuple[int, int, list[int]]]:
    """``(slot, cached, tokens)`` of each sequence, in order, cut so that all together stay within ``limit``."""
    if limit is None:
        return pending
    taken, left = [], limit
    for slot, count, tokens in pending:
        if left == 0:
            break
        taken.append((slot, count, tokens[:left]))
        left -= len(taken[-1][2])
    return taken


def _forward(model: Any, cache: Any, taken: list[tuple[int, int, list[int]]]) -> tuple[PackedBatch, Any]:
    slots, cached, tokens = zip(*taken, strict=True)
    batch = PackedBatch(slots, cached, tuple(len(run) for run in tokens))
    token_ids = ops.tensor_of(np.concatenate(tokens))
    with paddle.no_grad():
        return batch, model(token_ids, batch, cache)


def _check_prompts(model: Any, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> None:
    vocab_size, limit = model.config.vocab_size, model.config.max_position_embeddings
    for i, prompt in enumerate(prompts):
        if not len(prompt):
            raise ValueError(f"prompt {i} has no tokens; give at least one")
        if not 0 <= min(prompt) <= max(prompt) < vocab_size:
            raise ValueError(f"prompt {i} has token ids outside 0..{vocab_size - 1}; use the model's own tokenizer")
        if limit is not None and len(prompt) + max_new_tokens > limit:
            raise ValueError(
                f"prompt {i} of {len(prompt)} tokens and max_new_tokens {max_new_tokens} exceed the model's "
                f"max_position_embeddings {limit}; shorten one of them"
            )
