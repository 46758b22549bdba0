"""Packed batches of ragged sequences, and the cache that keeps their keys and values."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import paddle

from . import ops


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
    """Keys and values of ``num_slots`` sequences of up to ``max_tokens``, for this rank's kv heads and ``layers``.

    ``keys[layer]`` and ``values[layer]`` are ``[num_slots, kv_heads, max_tokens, head_dim]``, written in place. On CPU
    they are float32 numpy arrays, whatever ``dtype`` says, for attention is computed in numpy there.

    ``latent_dim``: each key's first so many elements are its value (latent attention), and only keys are kept.
    """

    def __init__(
        self,
        *,
        layers: Iterable[int],
        num_slots: int,
        max_tokens: int,
        kv_heads: int,
        head_dim: int,
        latent_dim: int | None = None,
        dtype: str = "float32",
    ) -> None:
        self.num_slots, self.max_tokens, self.kv_heads, self.head_dim = num_slots, max_tokens, kv_heads, head_dim
        self.on_host = paddle.get_device().startswith("cpu")
        shape = [num_slots, kv_heads, max_tokens, head_dim]
        self.latent_dim = latent_dim
        self.value_dim = head_dim if latent_dim is None else latent_dim
        self.keys = {layer: self._zeros(shape, dtype) for layer in layers}
        self.values = {layer: self._zeros(shape, dtype) for layer in self.keys if latent_dim is None}
        # The same memory as rows of head_dim, for one scatter a layer.
        self._key_rows = {layer: keys.reshape([-1, head_dim]) for layer, keys in self.keys.items()}
        self._value_rows = {layer: values.reshape([-1, head_dim]) for layer, values in self.values.items()}

    def rows_of(self, batch: "PackedBatch", positions: np.ndarray) -> Any:
        """Where ``write`` puts the batch's tokens: an index for each token and kv head."""
        slots: Any = np.repeat(np.array(batch.slots), batch.lengths)
        rows = (slots[:, None] * self.kv_heads + np.arange(self.kv_heads)) * self.max_tokens + positions[:, None]
        return rows.reshape(-1) if self.on_host else ops.tensor_of(rows.reshape(-1))

    def values_of(self, layer: int) -> Any:
        """``[num_slots, kv_heads, max_tokens, value_dim]``."""
        return self.values[layer] if self.latent_dim is None else self.keys[layer][..., : self.latent_dim]

    def are_neighbours(self, slot: int, other: int) -> bool:
        """Whether one ``locate`` can cover both, ``other`` right after ``slot``."""
        return other == slot + 1

    def locate(self, slots: Sequence[int], num_keys: int) -> Any:
        """Where the first ``num_keys`` tokens of neighbouring slots lie, for ``read``; the same for all layers."""
        return slice(slots[0], slots[0] + len(slots)), slice(0, num_keys)

    def read(self, layer: int, where: Any) -> tuple[Any, Any]:
        """Keys and values ``[slots, kv_heads, num_keys, dim]`` at a ``locate``d place."""
        slots, tokens = where
        return self.keys[layer][slots, :, tokens], self.values_of(layer)[slots, :, tokens]

    def write(self, layer: int, rows: Any, keys: Any, values: Any = None) -> None:
        """Store ``keys`` and ``values`` ``[num_tokens, kv_heads, head_dim]``, of the cache's own kind, at ``rows``."""
        stored = [(self._key_rows[layer], keys)]
        if values is not None:
            stored.append((self._value_rows[layer], values))
        for target, new in stored:
            flat = new.reshape([-1, self.head_dim])
            if self.on_host:
                target[rows] = flat
            else:
                paddle.scatter_(target, rows, ops.cast(flat, target.dtype))

    def check_fits(self, batch: PackedBatch) -> None:
        """ValueError unless every sequence of the batch has a slot here and room in it."""
        if not batch.slots:
            raise ValueError("the batch holds no sequence; give at least one")
        longest = max(count + length for count, length in zip(batch.cached, batch.lengths, strict=True))
        if longest > self.max_tokens:
            raise ValueError(f"a sequence of {longest} tokens does not fit the cache's max_tokens {self.max_tokens}")
        if not 0 <= min(batch.slots) <= max(batch.slots) < self.num_slots:
            raise ValueError(f"slots {batch.slots} are not all within the cache's {self.num_slots} slots")

    def _zeros(self, shape: list[int], dtype: str) -> Any:
        """Rows that nobody wrote are masked, but must not hold NaN. On CPU, pages come when they are first used."""
        return np.zeros(shape, np.float32) if self.on_host else paddle.zeros(shape, dtype=dtype)
