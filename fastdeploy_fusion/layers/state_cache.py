"""What state-space layers keep of each sequence, and which rows of a forward read and write it."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import paddle

from . import ops
from .kv_cache import PackedBatch


class StateCache:
    """Convolution and SSM states of ``num_slots`` sequences, float32, for this rank's part of each of ``layers``.

    ``conv[layer]`` is ``[num_slots, kernel - 1, channels]``, the last inputs of the convolution, oldest first;
    ``ssm[layer]`` is ``[num_slots, heads, head_dim, state_size]``. Their size does not depend on a sequence's length.
    """

    def __init__(
        self,
        *,
        layers: Iterable[int],
        num_slots: int,
        kernel: int,
        channels: int,
        heads: int,
        head_dim: int,
        state_size: int,
    ) -> None:
        layers = tuple(layers)
        self.num_slots = num_slots
        self.conv = {layer: paddle.zeros([num_slots, kernel - 1, channels]) for layer in layers}
        self.ssm = {layer: paddle.zeros([num_slots, heads, head_dim, state_size]) for layer in layers}


@dataclass(frozen=True)
class Prompt:
    """Rows ``first:end`` of the packed tokens continue ``slot``; ``is_new``: from an empty state."""

    first: int
    end: int
    slot: int
    is_new: bool


class StateStep:
    """What the state-space layers of one forward share about the batch.

    ``prompts``: runs of several tokens. ``singles``: rows of sequences that go one token on, all in one go; ``slots``
    are theirs. ``kept`` is None, or float32 ``[singles, 1, 1]`` with 0 for those that start from an empty state.
    """

    def __init__(self, batch: PackedBatch, cache: StateCache) -> None:
        self.cache = cache
        self.prompts: list[Prompt] = []
        rows, slots, kept = [], [], []
        for (first, end), slot, cached in zip(_runs(batch), batch.slots, batch.cached, strict=True):
            if end - first > 1:
                self.prompts.append(Prompt(first, end, slot, cached == 0))
            else:
                rows.append(first)
                slots.append(slot)
                kept.append(float(cached > 0))
        self.num_singles = len(rows)
        self.rows, self.slots = map(ops.tensor_of, (rows, slots))
        self.kept = None if all(kept) else ops.tensor_of(np.array(kept, np.float32)).reshape([-1, 1, 1])


def _runs(batch: PackedBatch) -> Iterator[tuple[int, int]]:
    ends = batch.ends
    yield from zip((0, *ends[:-1]), ends, strict=True)


def write_rows(states: Any, slots: Any, new: Any) -> None:
    """``states[slots] = new``, in place."""
    paddle.scatter_(states, slots, new)
