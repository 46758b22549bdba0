"""Attention over packed tokens: ragged sequences side by side in ``[num_tokens, hidden]``, with a KV cache.

``AttentionStep`` holds what all layers of one forward share (positions, cache rows, masks), so that it is made once and
not in every layer.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import paddle
import paddle.nn.functional as F

from . import ops
from .context import ContextSplit
from .kv_cache import KVCache, PackedBatch
from .rotary import RotaryEmbedding

QUERY_BLOCK = 256
"""Rows of one sequence that attend at a time: bounds the score matrix of a long prompt."""


@dataclass(frozen=True)
class _PromptBlock:
    """Rows ``first:end`` of the packed tokens attend to one sequence's keys, which lie at ``where``."""

    first: int
    end: int
    where: Any
    mask: Any

    def attend(self, q: Any, keys: Any, values: Any) -> Any:
        """``q [rows, heads, head_dim]`` and the sequence's ``keys``, ``values`` -> ``[rows, heads * value_dim]``."""
        rows, heads, head_dim = q.shape
        kv_heads, value_dim = keys.shape[1], values.shape[-1]
        grouped = q.reshape([rows, kv_heads, heads // kv_heads, head_dim]).transpose([1, 2, 0, 3])
        out = _attention(grouped, keys[0][:, None], values[0][:, None], self.mask)
        return out.transpose([2, 0, 1, 3]).reshape([rows, heads * value_dim])


@dataclass(frozen=True)
class _DecodeRun:
    """Rows ``first:end``, one token each of neighbouring sequences, whose keys lie at ``where``, in one go.

    ``mask`` is None when all are as long as the longest.
    """

    first: int
    end: int
    where: Any
    mask: Any

    def attend(self, q: Any, keys: Any, values: Any) -> Any:
        """``q [rows, heads, head_dim]`` and each row's ``keys``, ``values`` -> ``[rows, heads * value_dim]``."""
        rows, heads, head_dim = q.shape
        kv_heads, value_dim = keys.shape[1], values.shape[-1]
        grouped = q.reshape([rows, kv_heads, heads // kv_heads, head_dim])
        return _attention(grouped, keys, values, self.mask).reshape([rows, heads * value_dim])


def _attention(q: Any, k: Any, v: Any, mask: Any) -> Any:
    """``softmax(q @ k.T + mask) @ v`` over the last two axes; numpy arrays on CPU, tensors elsewhere.

    numpy takes a slice of the cache as it lies, where Paddle would copy it first.
    """
    if not isinstance(q, np.ndarray):
        scores = ops.cast(paddle.matmul(q, k, transpose_y=True), paddle.float32)
        scores = scores if mask is None else scores + mask
        return paddle.matmul(ops.cast(F.softmax(scores), v.dtype), v)
    scores = np.matmul(q, k.swapaxes(-1, -2))
    if mask is not None:
        scores += mask
    scores -= scores.max(-1, keepdims=True)
    np.exp(scores, out=scores)
    scores /= scores.sum(-1, keepdims=True)
    return np.matmul(scores, v)


class AttentionStep:
    """What every layer of one forward needs to know about the batch. Cheap to make, used once."""

    def __init__(
        self, batch: PackedBatch, cache: KVCache, rotary: RotaryEmbedding | None, split: ContextSplit | None = None
    ) -> None:
        """``rotary`` None: nothing is rotated.

        With ``split``, this rank attends for its part of the batch, and all keys and values reach its cache.
        """
        cache.check_fits(batch)
        self.cache, self.rotary, self.split = cache, rotary, split
        local = batch if split is None else split.local
        positions = local.positions()
        on_device = (lambda array: array) if cache.on_host else ops.tensor_of
        if rotary is not None:
            self.cos, self.sin = map(on_device, rotary.angles(positions))
        self.rows = cache.rows_of(batch, positions if local is batch else batch.positions())
        self.parts = list(_split(local, cache, on_device))

    def rotate(self, x: Any) -> Any:
        """``x [num_tokens, heads, head_dim]`` rotated to its rows' positions."""
        return x if self.rotary is None else self.rotary.rotate(x, self.cos, self.sin)

    def attend(self, layer: int, q: Any, k: Any, v: Any, scale: float) -> Any:
        """Causal grouped-query attention; stores ``k`` and ``v`` first.

        ``q [num_tokens, heads, head_dim]``, ``k`` and ``v`` ``[num_tokens, kv_heads, head_dim]``, all local and already
        rotated; ``v`` is None where the cache takes values from the keys. The result is ``[num_tokens, heads *
        value_dim]`` in the dtype of ``q``.
        """
        if self.split is not None:
            k, v = self.split.gather_kv(k, v)
        if self.cache.on_host:
            q_rows, *new = [ops.cast(tensor, paddle.float32) for tensor in (q, k, v) if tensor is not None]
            self.cache.write(layer, self.rows, *map(ops.host_array, new))
            out = ops.host_empty([q.shape[0], q.shape[1] * self.cache.value_dim])
            out_rows = ops.host_array(out)
            scaled = ops.host_array(q_rows) * np.float32(scale)
            for part in self.parts:
                read = self.cache.read(layer, part.where)
                out_rows[part.first : part.end] = part.attend(scaled[part.first : part.end], *read)
            return ops.cast(out, q.dtype)
        self.cache.write(layer, self.rows, k, v)
        scaled = q * scale
        return paddle.concat(
            [part.attend(scaled[part.first : part.end], *self.cache.read(layer, part.where)) for part in self.parts]
        )


def _split(
    batch: PackedBatch, cache: KVCache, on_device: Callable[[np.ndarray], Any]
) -> Iterator[_PromptBlock | _DecodeRun]:
    """The batch in row order: single tokens of neighbouring slots together, longer runs in blocks."""
    start, index = 0, 0
    while index < len(batch.slots):
        slot, count, length = batch.slots[index], batch.cached[index], batch.lengths[index]
        if length == 1:
            num_keys = _run_of_single_tokens(batch, cache, index)
            end = start + len(num_keys)
            where = cache.locate(batch.slots[index : index + len(num_keys)], max(num_keys))
            yield _DecodeRun(start, end, where, _length_mask(num_keys, on_device))
            start, index = end, index + len(num_keys)
            continue
        for first in range(0, length, QUERY_BLOCK):
            rows = min(QUERY_BLOCK, length - first)
            seen = count + first + rows
            where, mask = cache.locate([slot], seen), _causal_mask(rows, seen, on_device)
            yield _PromptBlock(start + first, start + first + rows, where, mask)
        start, index = start + length, index + 1


def _run_of_single_tokens(batch: PackedBatch, cache: KVCache, index: int) -> list[int]:
    """Keys of each sequence from ``index`` on that can be served together: neighbours, padding at most half."""
    num_keys = [batch.cached[index] + 1]
    longest = total = num_keys[0]
    for i in range(index + 1, len(batch.slots)):
        added = batch.cached[i] + 1
        if batch.lengths[i] != 1 or not cache.are_neighbours(batch.slots[i - 1], batch.slots[i]):
            break
        longest, total = max(longest, added), total + added
        if longest * (len(num_keys) + 1) > 2 * total:
            break
        num_keys.append(added)
    return num_keys


def _length_mask(num_keys: list[int], on_device: Callable[[np.ndarray], Any]) -> Any:
    """float32 ``[rows, 1, 1, longest]``: -inf past each row's own keys; None when all have the same number."""
    longest = max(num_keys)
    if min(num_keys) == longest:
        return None
    mask = np.where(np.arange(longest) < np.array(num_keys)[:, None], 0.0, -np.inf).astype(np.float32)
    return on_device(mask[:, None, None])


def _causal_mask(rows: int, num_keys: int, on_device: Callable[[np.ndarray], Any]) -> Any:
    """float32 ``[rows, num_keys]``: 0 where row ``i``, which is key ``num_keys - rows + i``, may look; else -inf."""
    last_visible = np.arange(num_keys - rows, num_keys)[:, None]
    mask = np.where(np.arange(num_keys) <= last_visible, 0.0, -np.inf).astype(np.float32)
    return on_device(mask)
