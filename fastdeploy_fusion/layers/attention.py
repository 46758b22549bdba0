"""Attention over packed tokens: ragged sequences side by side in ``[num_tokens, hidden]``, with a KV cache.

A ``PackedBatch`` says, on the host, which rows belong to which sequence. ``AttentionStep`` holds what all layers of one
forward share (positions, cache rows, masks), so that it is made once and not in every layer.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import paddle
import paddle.nn.functional as F

from . import ops

QUERY_BLOCK = 256
"""Rows of one sequence that attend at a time: bounds the score matrix of a long prompt."""


@dataclass(frozen=True)
class PackedBatch:
    """Sequences of one forward, in the order of their rows.

    ``slots``: each one's place in the KV cache. ``cached``: tokens it has there already. ``lengths``: its new tokens,
    at least one. Equal on all ranks.
    """

    slots: tuple[int, ...]
    cached: tuple[int, ...]
    lengths: tuple[int, ...]

    def __post_init__(self) -> None:
        if not len(self.slots) == len(self.cached) == len(self.lengths):
            raise ValueError(f"{self} needs one slot, one cached count and one length a sequence")
        if len(set(self.slots)) != len(self.slots):
            raise ValueError(f"slots {self.slots} hold one sequence twice; pack a sequence's tokens as one run")
        if any(length < 1 for length in self.lengths) or any(count < 0 for count in self.cached):
            raise ValueError(f"{self} needs lengths of at least 1 and cached counts of at least 0; leave out idle ones")

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)

    @property
    def ends(self) -> tuple[int, ...]:
        """One past the last row of each sequence."""
        return tuple(np.cumsum(self.lengths).tolist())

    def positions(self) -> np.ndarray:
        """int64 ``[num_tokens]``: the position of every row in its sequence."""
        runs = [np.arange(count, count + length) for count, length in zip(self.cached, self.lengths, strict=True)]
        return np.concatenate(runs)


class KVCache:
    """Keys and values of ``num_slots`` sequences of up to ``max_tokens``, for the local kv heads of every layer.

    Each is ``[num_slots, kv_heads, max_tokens, head_dim]``, allocated once and written in place. On CPU it is float32
    whatever ``dtype`` says, since attention computes in float32 there.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_slots: int,
        max_tokens: int,
        kv_heads: int,
        head_dim: int,
        dtype: str = "float32",
    ) -> None:
        self.num_slots, self.max_tokens, self.kv_heads, self.head_dim = num_slots, max_tokens, kv_heads, head_dim
        on_cpu = paddle.get_device().startswith("cpu")
        shape = [num_slots, kv_heads, max_tokens, head_dim]
        dtype = "float32" if on_cpu else dtype
        self.keys = [paddle.empty(shape, dtype=dtype) for _ in range(num_layers)]
        self.values = [paddle.empty(shape, dtype=dtype) for _ in range(num_layers)]
        # The same memory as rows of head_dim, for one scatter a layer.
        self._key_rows = [keys.reshape([-1, head_dim]) for keys in self.keys]
        self._value_rows = [values.reshape([-1, head_dim]) for values in self.values]

    def write(self, layer: int, rows: Any, keys: Any, values: Any) -> None:
        """Store ``keys`` and ``values`` ``[num_tokens, kv_heads, head_dim]`` at ``rows`` (``AttentionStep.rows``)."""
        for target, new in ((self._key_rows[layer], keys), (self._value_rows[layer], values)):
            paddle.scatter_(target, rows, new.reshape([-1, self.head_dim]).astype(target.dtype))


class RotaryEmbedding:
    """Rotates the first ``rotary_dim`` of each head, halves paired (``x[i]`` with ``x[i + rotary_dim / 2]``)."""

    def __init__(self, rotary_dim: int, theta: float) -> None:
        if rotary_dim <= 0 or rotary_dim % 2:
            raise ValueError(f"rotary_dim is {rotary_dim}; it must be even and positive: correct partial_rotary_factor")
        if theta <= 0:
            raise ValueError(f"rope_theta is {theta}; it must be positive")
        self.rotary_dim = rotary_dim
        exponents = np.arange(0, rotary_dim, 2, dtype=np.float32) / np.float32(rotary_dim)
        self.frequencies = (1.0 / np.power(np.float32(theta), exponents)).astype(np.float32)

    def angles(self, positions: np.ndarray, place: Any) -> tuple[Any, Any]:
        """Cosines and sines ``[num_tokens, 1, rotary_dim / 2]`` in float32."""
        angles = positions.astype(np.float32)[:, None, None] * self.frequencies
        return paddle.to_tensor(np.cos(angles), place=place), paddle.to_tensor(np.sin(angles), place=place)

    def rotate(self, x: Any, cos: Any, sin: Any) -> Any:
        """``x [num_tokens, heads, head_dim]``, rotated in float32; same shape and dtype."""
        half, dim = self.rotary_dim // 2, self.rotary_dim
        wide = x.astype("float32")
        first, second = wide[:, :, :half], wide[:, :, half:dim]
        parts = [first * cos - second * sin, second * cos + first * sin]
        if dim < x.shape[-1]:
            parts.append(wide[:, :, dim:])
        return paddle.concat(parts, axis=-1).astype(x.dtype)


@dataclass(frozen=True)
class _Block:
    """Rows ``first:end`` of the packed tokens attend to the first ``num_keys`` of ``slot``, less those masked."""

    first: int
    end: int
    slot: int
    num_keys: int
    mask: Any


class AttentionStep:
    """What every layer of one forward needs to know about the batch. Cheap to make, used once."""

    def __init__(self, batch: PackedBatch, cache: KVCache, rotary: RotaryEmbedding) -> None:
        _check_fits(batch, cache)
        self.batch, self.cache, self.rotary = batch, cache, rotary
        positions = batch.positions()
        place = cache.keys[0].place
        self.cos, self.sin = rotary.angles(positions, place)
        slots: Any = np.repeat(np.array(batch.slots), batch.lengths)
        heads = np.arange(cache.kv_heads)
        rows = (slots[:, None] * cache.kv_heads + heads) * cache.max_tokens + positions[:, None]
        self.rows = paddle.to_tensor(rows.reshape(-1), place=place)
        self.blocks = list(self._split(place))

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
        q_scaled = ops.widen(q) * scale
        outputs = [_attend_block(q_scaled[b.first : b.end], keys, values, b) for b in self.blocks]
        out = outputs[0] if len(outputs) == 1 else paddle.concat(outputs)
        return out.astype(q.dtype)

    def _split(self, place: Any) -> Sequence[_Block]:
        blocks, start = [], 0
        for slot, count, length in zip(self.batch.slots, self.batch.cached, self.batch.lengths, strict=True):
            for first in range(0, length, QUERY_BLOCK):
                rows = min(QUERY_BLOCK, length - first)
                num_keys = count + first + rows
                mask = None if rows == 1 else _causal_mask(rows, num_keys, place)
                blocks.append(_Block(start + first, start + first + rows, slot, num_keys, mask))
            start += length
        return blocks


def _attend_block(q: Any, keys: Any, values: Any, block: _Block) -> Any:
    """``q [rows, heads, head_dim]`` -> ``[rows, heads * head_dim]``: one batched matmul a kv head, all its queries."""
    rows, heads, head_dim = q.shape
    kv_heads = keys.shape[1]
    group = heads // kv_heads
    k = keys[block.slot, :, : block.num_keys]
    v = values[block.slot, :, : block.num_keys]
    if rows == 1:
        probabilities = F.softmax(paddle.matmul(q.reshape([kv_heads, group, head_dim]), k, transpose_y=True))
        return paddle.matmul(probabilities, v).reshape([1, heads * head_dim])
    grouped = q.reshape([rows, kv_heads, group, head_dim]).transpose([1, 2, 0, 3])
    scores = paddle.matmul(grouped.reshape([kv_heads, group * rows, head_dim]), k, transpose_y=True)
    scores = scores.reshape([kv_heads, group, rows, block.num_keys]) + block.mask
    probabilities = F.softmax(scores.astype("float32")).astype(q.dtype)
    out = paddle.matmul(probabilities.reshape([kv_heads, group * rows, block.num_keys]), v)
    return out.reshape([kv_heads, group, rows, head_dim]).transpose([2, 0, 1, 3]).reshape([rows, heads * head_dim])


def _causal_mask(rows: int, num_keys: int, place: Any) -> Any:
    """float32 ``[rows, num_keys]``: 0 where row ``i``, which is key ``num_keys - rows + i``, may look; else -inf."""
    last_visible = np.arange(num_keys - rows, num_keys)[:, None]
    mask = np.where(np.arange(num_keys) <= last_visible, 0.0, -np.inf).astype(np.float32)
    return paddle.to_tensor(mask, place=place)


def _check_fits(batch: PackedBatch, cache: KVCache) -> None:
    if not batch.slots:
        raise ValueError("the batch holds no sequence; give at least one")
    longest = max(count + length for count, length in zip(batch.cached, batch.lengths, strict=True))
    if longest > cache.max_tokens:
        raise ValueError(f"a sequence of {longest} tokens does not fit the cache's max_tokens {cache.max_tokens}")
    if not 0 <= min(batch.slots) <= max(batch.slots) < cache.num_slots:
        raise ValueError(f"slots {batch.slots} are not all within the cache's {cache.num_slots} slots")
