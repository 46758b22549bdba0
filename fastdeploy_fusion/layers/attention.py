"""Attention over packed tokens: ragged sequences side by side in ``[num_tokens, hidden]``, with a KV cache.

``AttentionStep`` holds what all layers of one forward share (positions, cache rows, masks), so that it is made once and
not in every layer.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import paddle
import paddle.nn.functional as F

from . import ops
from .kv_cache import KVCache, PackedBatch
from .rotary import RotaryEmbedding

QUERY_BLOCK = 256
"""Rows of one sequence that attend at a time: bounds the score matrix of a long prompt."""


@dataclass(frozen=True)
class _PromptBlock:
    """Rows ``first:end`` of the packed tokens attend to the first ``num_keys`` of ``slot``, less those masked."""

    first: int
    end: int
    slot: int
    num_keys: int
    mask: Any

    def attend(self, q: Any, keys: Any, values: Any) -> Any:
        """``q [rows, heads, head_dim]`` -> ``[rows, heads * head_dim]``: a matmul a kv head, all its queries in it."""
        rows, heads, head_dim = q.shape
        kv_heads = keys.shape[1]
        group = heads // kv_heads
        k, v = keys[self.slot, :, : self.num_keys], values[self.slot, :, : self.num_keys]
        grouped = q.reshape([rows, kv_heads, group, head_dim]).transpose([1, 2, 0, 3])
        scores = paddle.matmul(grouped.reshape([kv_heads, group * rows, head_dim]), k, transpose_y=True)
        scores = scores.reshape([kv_heads, group, rows, self.num_keys]).astype("float32") + self.mask
        probabilities = F.softmax(scores).astype(q.dtype)
        out = paddle.matmul(probabilities.reshape([kv_heads, group * rows, self.num_keys]), v)
        return out.reshape([kv_heads, group, rows, head_dim]).transpose([2, 0, 1, 3]).reshape([rows, heads * head_dim])


@dataclass(frozen=True)
class _DecodeRun:
    """Rows ``first:end``, one token each of sequences in consecutive slots from ``slot`` on, in one go.

    ``num_keys``: of the longest; ``mask`` is None when all are that long.
    """

    first: int
    end: int
    slot: int
    num_keys: int
    mask: Any

    def attend(self, q: Any, keys: Any, values: Any) -> Any:
        """``q [rows, heads, head_dim]`` -> ``[rows, heads * head_dim]``."""
        rows, heads, head_dim = q.shape
        kv_heads = keys.shape[1]
        slots = slice(self.slot, self.slot + rows)
        k, v = keys[slots, :, : self.num_keys], values[slots, :, : self.num_keys]
        scores = paddle.matmul(q.reshape([rows, kv_heads, heads // kv_heads, head_dim]), k, transpose_y=True)
        if self.mask is not None:
            scores = scores + self.mask
        probabilities = ops.cast(F.softmax(ops.cast(scores, paddle.float32)), q.dtype)
        return paddle.matmul(probabilities, v).reshape([rows, heads * head_dim])


class AttentionStep:
    """What every layer of one forward needs to know about the batch. Cheap to make, used once."""

    def __init__(self, batch: PackedBatch, cache: KVCache, rotary: RotaryEmbedding) -> None:
        cache.check_fits(batch)
        self.batch, self.cache, self.rotary = batch, cache, rotary
        positions = batch.positions()
        place = cache.keys[0].place
        self.cos, self.sin = rotary.angles(positions, place)
        slots: Any = np.repeat(np.array(batch.slots), batch.lengths)
        heads = np.arange(cache.kv_heads)
        rows = (slots[:, None] * cache.kv_heads + heads) * cache.max_tokens + positions[:, None]
        self.rows = paddle.to_tensor(rows.reshape(-1), place=place)
        self.parts = list(_split(batch, place))

    def rotate(self, x: Any) -> Any:
        """``x [num_tokens, heads, head_dim]`` rotated to its rows' positions."""
        return self.rotary.rotate(x, self.cos, self.sin)

    def attend(self, layer: int, q: Any, k: Any, v: Any, scale: float) -> Any:
        """Causal grouped-query attention; stores ``k`` and ``v`` first.

        ``q [num_tokens, heads, head_dim]``, ``k`` and ``v`` ``[num_tokens, kv_heads, head_dim]``, all local and already
        rotated; result ``[num_tokens, heads * head_dim]`` in the dtype of ``q``.
        """
        self.cache.write(layer, self.rows, k, v)
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        scaled = ops.widen(q) * scale
        if len(self.parts) == 1:
            return ops.cast(self.parts[0].attend(scaled, keys, values), q.dtype)
        outputs = [part.attend(scaled[part.first : part.end], keys, values) for part in self.parts]
        return ops.cast(paddle.concat(outputs), q.dtype)


def _split(batch: PackedBatch, place: Any) -> Iterator[_PromptBlock | _DecodeRun]:
    """The batch in row order: single tokens of neighbouring slots together, longer runs in blocks."""
    start, index = 0, 0
    while index < len(batch.slots):
        slot, count, length = batch.slots[index], batch.cached[index], batch.lengths[index]
        if length == 1:
            num_keys = _run_of_single_tokens(batch, index)
            end = start + len(num_keys)
            yield _DecodeRun(start, end, slot, max(num_keys), _length_mask(num_keys, place))
            start, index = end, index + len(num_keys)
            continue
        for first in range(0, length, QUERY_BLOCK):
            rows = min(QUERY_BLOCK, length - first)
            seen = count + first + rows
            yield _PromptBlock(start + first, start + first + rows, slot, seen, _causal_mask(rows, seen, place))
        start, index = start + length, index + 1


def _run_of_single_tokens(batch: PackedBatch, index: int) -> list[int]:
    """Keys of each sequence from ``index`` on that can be served together: consecutive slots, padding at most half."""
    num_keys = [batch.cached[index] + 1]
    for i in range(index + 1, len(batch.slots)):
        longer = [*num_keys, batch.cached[i] + 1]
        if batch.lengths[i] != 1 or batch.slots[i] != batch.slots[i - 1] + 1:
            break
        if max(longer) * len(longer) > 2 * sum(longer):
            break
        num_keys = longer
    return num_keys


def _length_mask(num_keys: list[int], place: Any) -> Any:
    """float32 ``[rows, 1, 1, longest]``: -inf past each row's own keys; None when all have the same number."""
    longest = max(num_keys)
    if min(num_keys) == longest:
        return None
    mask = np.where(np.arange(longest) < np.array(num_keys)[:, None], 0.0, -np.inf).astype(np.float32)
    return paddle.to_tensor(mask[:, None, None], place=place)


def _causal_mask(rows: int, num_keys: int, place: Any) -> Any:
    """float32 ``[rows, num_keys]``: 0 where row ``i``, which is key ``num_keys - rows + i``, may look; else -inf."""
    last_visible = np.arange(num_keys - rows, num_keys)[:, None]
    mask = np.where(np.arange(num_keys) <= last_visible, 0.0, -np.inf).astype(np.float32)
    return paddle.to_tensor(mask, place=place)
