"""A KV cache whose sequences lie in blocks anywhere in it: a fixed budget of tokens serves any mix of lengths."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import paddle

from . import ops
from .kv_cache import KVCache, PackedBatch


class PageTable:
    """Which blocks of a cache of ``num_blocks * block_size`` tokens hold the sequence of each slot. Equal on all ranks.

    Who may have which block is decided elsewhere (``serve/blocks.py``).
    """

    def __init__(self, *, num_slots: int, num_blocks: int, block_size: int) -> None:
        self.num_slots, self.num_blocks, self.block_size = num_slots, num_blocks, block_size
        self.table = np.zeros((num_slots, num_blocks), np.int64)
        self.num_held = np.zeros(num_slots, np.int64)

    @property
    def num_rows(self) -> int:
        return self.num_blocks * self.block_size

    def assign(self, slot: int, blocks: Sequence[int]) -> None:
        """From now on ``slot`` holds another sequence, in these blocks in order."""
        if not 0 <= slot < self.num_slots or not blocks or not 0 <= min(blocks) <= max(blocks) < self.num_blocks:
            raise ValueError(f"blocks {list(blocks)} of slot {slot} are not within {self.num_blocks} blocks")
        # Past its end a slot points at its own first block: what is read there is masked, and never another's.
        self.table[slot] = blocks[0]
        self.table[slot, : len(blocks)] = blocks
        self.num_held[slot] = len(blocks) * self.block_size

    def rows_at(self, slots: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """int64 rows of the cache, for ``slots`` and ``positions`` that broadcast against each other."""
        block, offset = np.divmod(positions, self.block_size)
        return self.table[slots, block] * self.block_size + offset

    def run_of(self, slot: int, num_keys: int) -> slice | None:
        """The first ``num_keys`` rows of a slot as a slice, where its blocks lie side by side; else None."""
        blocks = self.table[slot, : -(-num_keys // self.block_size)]
        if (np.diff(blocks) != 1).any():
            return None
        start = int(blocks[0]) * self.block_size
        return slice(start, start + num_keys)


class PagedKVCache(KVCache):
    """As ``KVCache``, with sequences placed by ``pages``; ``keys[layer]`` is ``[1, kv_heads, num_rows, head_dim]``."""

    def __init__(self, pages: PageTable, **sizes: Any) -> None:
        """``sizes``: as of ``KVCache``, less ``num_slots`` and ``max_tokens``, which are those of ``pages``."""
        super().__init__(num_slots=1, max_tokens=pages.num_rows, **sizes)
        self.pages = pages

    def rows_of(self, batch: PackedBatch, positions: np.ndarray) -> Any:
        places = self.pages.rows_at(np.repeat(np.array(batch.slots), batch.lengths), positions)
        rows = (np.arange(self.kv_heads) * self.max_tokens + places[:, None]).reshape(-1)
        return rows if self.on_host else ops.tensor_of(rows)

    def are_neighbours(self, slot: int, other: int) -> bool:
        return True

    def locate(self, slots: Sequence[int], num_keys: int) -> Any:
        run = self.pages.run_of(slots[0], num_keys) if len(slots) == 1 else None
        if run is not None:
            return run
        rows = self.pages.rows_at(np.array(slots)[:, None], np.arange(num_keys))
        return rows if self.on_host else ops.tensor_of(rows)

    def read(self, layer: int, where: Any) -> tuple[Any, Any]:
        keys = self._gather(self.keys[layer], where)
        if self.latent_dim is not None:
            return keys, keys[..., : self.latent_dim]
        return keys, self._gather(self.values[layer], where)

    def _gather(self, stored: Any, where: Any) -> Any:
        """``[slots, kv_heads, num_keys, dim]``; a view where one slot's rows lie side by side."""
        if isinstance(where, slice):
            return stored[:, :, where]
        if self.on_host:
            return stored[0][:, where].swapaxes(0, 1)
        heads, dim = stored.shape[1], stored.shape[3]
        rows = paddle.gather(stored[0], where.reshape([-1]), axis=1)
        return rows.reshape([heads, *where.shape, dim]).transpose([1, 0, 2, 3])

    def check_fits(self, batch: PackedBatch) -> None:
        if not batch.slots:
            raise ValueError("the batch holds no sequence; give at least one")
        for slot, cached, length in zip(batch.slots, batch.cached, batch.lengths, strict=True):
            if not 0 <= slot < self.pages.num_slots:
                raise ValueError(f"slot {slot} is not within the cache's {self.pages.num_slots} slots")
            if cached + length > self.pages.num_held[slot]:
                raise ValueError(
                    f"{cached + length} tokens of slot {slot} do not fit its {self.pages.num_held[slot]}; assign more "
                    "blocks"
                )
