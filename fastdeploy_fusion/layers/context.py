"""Context parallelism: a prompt's tokens dealt to ranks that hold the same shards of every layer."""

from typing import TYPE_CHECKING, Any

import numpy as np
import paddle

from . import ops
from .kv_cache import PackedBatch

if TYPE_CHECKING:
    from ..groups import RankGroup


class ContextSplit:
    """Which rows of one forward this rank computes, and how the rows of all ranks come together again.

    Every sequence is cut into one run of neighbouring rows a rank, equal up to one row. A forward without a sequence of
    at least one row a rank (decoding) is not cut: all ranks run it alike, for they all hold the whole KV cache.

    Attributes:
        local: this rank's rows as a batch of their own; the whole batch where nothing is cut.
    """

    def __init__(self, batch: PackedBatch, group: "RankGroup") -> None:
        self.group = group
        self.local = batch
        self.is_cut = group.size > 1 and max(batch.lengths, default=0) >= group.size
        if self.is_cut:
            counts = _row_counts(batch.lengths, group.size)
            rows = [_rows_of(batch, counts, rank) for rank in range(group.size)]
            self._most = max(map(len, rows))
            self._rows = rows[group.rank]
            self._places = np.empty(batch.num_tokens, np.int64)
            for rank, own in enumerate(rows):
                self._places[own] = rank * self._most + np.arange(len(own))
            self.local = _part(batch, counts, group.rank)

    def take(self, rows: Any) -> Any:
        """This rank's rows of a tensor ``[num_tokens, ...]``."""
        return paddle.gather(rows, ops.tensor_of(self._rows, rows.place)) if self.is_cut else rows

    def gather(self, rows: Any) -> Any:
        """``[local tokens, ...]`` of every rank to ``[num_tokens, ...]`` in the batch's order. Collective if cut."""
        if not self.is_cut:
            return rows
        missing = self._most - rows.shape[0]
        if missing:
            rows = paddle.concat([rows, paddle.zeros([missing, *rows.shape[1:]], dtype=rows.dtype)])
        together = paddle.concat(self.group.all_gather(rows))
        return paddle.gather(together, ops.tensor_of(self._places, rows.place))

    def gather_kv(self, keys: Any, values: Any) -> tuple[Any, Any]:
        """Both ``[local tokens, kv_heads, head_dim]``, gathered in one go; ``values`` None: keys alone."""
        if not self.is_cut:
            return keys, values
        if values is None:
            return self.gather(keys), None
        both = self.gather(paddle.concat([keys, values], axis=1))
        kv_heads = keys.shape[1]
        return both[:, :kv_heads], both[:, kv_heads:]


def _row_counts(lengths: tuple[int, ...], num_ranks: int) -> np.ndarray:
    """int64 ``[ranks, sequences]``. Rows left over by division go to other ranks from sequence to sequence."""
    base, extra = np.divmod(np.array(lengths), num_ranks)
    turn = (np.arange(num_ranks)[:, None] + np.arange(len(lengths))) % num_ranks
    return base + (turn < extra)


def _rows_of(batch: PackedBatch, counts: np.ndarray, rank: int) -> np.ndarray:
    """The rows of the whole batch that ``rank`` computes, ascending."""
    starts = np.array([0, *batch.ends[:-1]]) + counts[:rank].sum(0)
    return np.concatenate([np.arange(s, s + n) for s, n in zip(starts.tolist(), counts[rank].tolist(), strict=True)])


def _part(batch: PackedBatch, counts: np.ndarray, rank: int) -> PackedBatch:
    """A sequence's earlier rows lie on lower ranks; for this rank they count as cached, and are when it attends."""
    cached = np.array(batch.cached) + counts[:rank].sum(0)
    held = np.flatnonzero(counts[rank]).tolist()
    return PackedBatch(
        slots=tuple(batch.slots[i] for i in held),
        cached=tuple(cached[held].tolist()),
        lengths=tuple(counts[rank][held].tolist()),
    )
