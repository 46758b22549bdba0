"""Token embedding and output head, split over the vocabulary.

The vocabulary is padded to a multiple of the ranks; the padded rows are zero and never leave these layers.
"""

from typing import TYPE_CHECKING, Any

import paddle
import paddle.nn.functional as F

from ..sites import parse_site
from . import ops
from .parameter import Outline, TensorSpec, WeightedLayer, empty_parameter, host_view

if TYPE_CHECKING:
    from ..fusion import AllReduceFusion


class _VocabSharded(WeightedLayer):
    def __init__(self, vocab_size: int, hidden_size: int, tp: "AllReduceFusion", prefix: str, dtype: str) -> None:
        super().__init__()
        prefix = parse_site(prefix).weight_prefix
        if vocab_size <= 0 or hidden_size <= 0:
            raise ValueError(f"{prefix!r} is [{vocab_size}, {hidden_size}]; both sizes must be positive")
        self.vocab_size, self.hidden_size, self.tp = vocab_size, hidden_size, tp
        self.prefix, self.key = prefix, f"{prefix}.weight"
        self.local_rows = -(-vocab_size // tp.world_size)
        self.first_row = min(tp.rank * self.local_rows, vocab_size)
        self.stored_rows = min(self.first_row + self.local_rows, vocab_size) - self.first_row

    def _make_weight(self, dtype: str) -> Any:
        weight = empty_parameter([self.local_rows, self.hidden_size], dtype)
        if self.stored_rows < self.local_rows and not isinstance(weight, Outline):
            if weight.place.is_cpu_place():
                host_view(weight)[self.stored_rows :] = 0
            else:
                weight[self.stored_rows :] = 0.0
        return weight

    def own_tensors(self) -> list[TensorSpec]:
        every = slice(0, self.hidden_size)
        stored = slice(self.first_row, self.first_row + self.stored_rows)
        shape = (self.vocab_size, self.hidden_size)
        return [TensorSpec(self.key, shape, self.weight, (slice(0, self.stored_rows), every), (stored, every))]


class VocabParallelEmbedding(_VocabSharded):
    """``forward(token_ids [num_tokens] int64) -> [num_tokens, hidden_size]``, complete on every rank.

    Each rank looks up the tokens it holds, and the ranks' rows are added: one reduction, which all ranks must join.
    Ids must lie in ``[0, vocab_size)``.
    """

    def __init__(
        self, vocab_size: int, hidden_size: int, *, tp: "AllReduceFusion", prefix: str, dtype: str = "float32"
    ) -> None:
        super().__init__(vocab_size, hidden_size, tp, prefix, dtype)
        self.weight = self._make_weight(dtype)

    def forward(self, token_ids: Any) -> Any:
        if self.tp.world_size == 1:
            return F.embedding(token_ids, self.weight)
        local = token_ids - self.first_row
        held = paddle.logical_and(local >= 0, local < self.stored_rows)
        rows = F.embedding(paddle.where(held, local, paddle.zeros_like(local)), self.weight)
        mask = held.unsqueeze(-1).astype("float32")
        own = (ops.widen(rows) * mask.astype(ops.widen(rows).dtype)).astype(rows.dtype)
        return self.tp.all_reduce(own, self.prefix)


class ParallelLMHead(_VocabSharded):
    """``forward(hidden [num_tokens, hidden_size]) -> logits [num_tokens, vocab_size]`` in float32, on every rank alike.

    Ranks exchange their columns, so the logits are the same bytes on every rank; all must call it alike. With
    ``tied_to`` it uses the embedding's weight and reads nothing from the checkpoint.
    """

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        *,
        tp: "AllReduceFusion",
        prefix: str,
        tied_to: VocabParallelEmbedding | None = None,
        dtype: str = "float32",
    ) -> None:
        super().__init__(vocab_size, hidden_size, tp, prefix, dtype)
        self.tied = tied_to is not None
        if tied_to is not None and (tied_to.vocab_size, tied_to.hidden_size) != (vocab_size, hidden_size):
            raise ValueError(
                f"head [{vocab_size}, {hidden_size}] can't be tied to an embedding "
                f"[{tied_to.vocab_size}, {tied_to.hidden_size}]; give both the same sizes"
            )
        self.weight = tied_to.weight if tied_to is not None else self._make_weight(dtype)

    def forward(self, hidden: Any) -> Any:
        logits = ops.linear(hidden, self.weight).astype("float32")
        if self.tp.world_size == 1:
            return logits
        # Ranks hold the vocabulary in rank order, so all padding is at the end.
        return self.tp.all_gather(logits)[:, : self.vocab_size].contiguous()

    def own_tensors(self) -> list[TensorSpec]:
        return [] if self.tied else super().own_tensors()
