"""Mixture of experts: stacked weights of this rank's experts, and one sum for routed and shared experts."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import paddle

from ..sites import parse_site
from . import ops
from .parameter import TensorSpec, WeightedLayer, empty_parameter
from .shards import shard_slice
from .sums import owed_sum, settle

if TYPE_CHECKING:
    from ..config import ParallelConfig
    from ..fusion import AllReduceFusion
    from ..topology import Place


@dataclass(frozen=True)
class ExpertPlacement:
    """What one rank holds: the experts of ``experts``, and of each its ``shard`` of ``num_shards``.

    Pure tensor parallelism is every expert and one shard a rank; pure expert parallelism a range of experts and one
    shard. Over all ranks every shard of every expert must be held exactly once.
    """

    experts: range
    shard: int
    num_shards: int

    @classmethod
    def dealt(cls, num_experts: int, place: "Place", layout: "ParallelConfig") -> "ExpertPlacement":
        """Experts dealt out whole, in order, to the layout's parts; ranks of a part share each expert's matrices.

        Raises:
            ValueError: the parts don't divide the experts.
        """
        parts = layout.expert_parallel_size
        own = shard_slice(num_experts, place.expert_part, parts, "number of experts", "expert_parallel_size")
        return cls(range(own.start, own.stop), place.expert_shard, layout.moe_tensor_parallel_size)


class FusedMoE(WeightedLayer):
    """Routed experts and optional shared ones, owing one sum: ``[num_tokens, hidden]`` in and out.

    ``router(x)`` gives float32 weights and expert ids ``[num_tokens, top_k]`` and must choose alike on all ranks.
    ``shared(x)`` gives this rank's unreduced output (its down projection has ``reduce_results=False``); it is added to
    the routed experts' before the one sum. The result is as ``RowParallelLinear``'s: complete, or a ``PartialSum`` at a
    marked prefix, or raw with ``reduce_results=False``.

    ``gated``: experts are SwiGLU, with weights ``[local experts, 2 * local_intermediate, hidden]`` (gate, then up) and
    ``[local experts, hidden, local_intermediate]``; else squared ReLU, without the gate's half.

    ``narrow`` and ``widen`` take the routed experts' input to, and their output from, a hidden size of their own; that
    is ``hidden_size`` then. The output is unreduced when it is widened, so ``widen`` must be linear, without a bias.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        num_experts: int,
        *,
        tp: "AllReduceFusion",
        prefix: str,
        router: Callable[[Any], tuple[Any, Any]],
        shared: Callable[[Any], Any] | None = None,
        placement: ExpertPlacement | None = None,
        gated: bool = True,
        narrow: Callable[[Any], Any] | None = None,
        widen: Callable[[Any], Any] | None = None,
        reduce_results: bool = True,
        dtype: str = "float32",
    ) -> None:
        super().__init__()
        site = parse_site(prefix)
        self.prefix, self.tp = site.weight_prefix, tp
        self.owed = owed_sum(site, tp, reduce_results)
        self.placement = placement or ExpertPlacement(range(num_experts), tp.rank, tp.world_size)
        _check_placement(self.placement, num_experts)
        what = f"moe_intermediate_size of {self.prefix!r}"
        self.columns = shard_slice(intermediate_size, self.placement.shard, self.placement.num_shards, what)
        local = self.columns.stop - self.columns.start
        self.num_experts, self.hidden_size, self.intermediate_size = num_experts, hidden_size, intermediate_size
        self.router, self.shared = router, shared
        self.gated, self.narrow, self.widen = gated, narrow, widen
        self.gate_up = empty_parameter([len(self.placement.experts), (1 + gated) * local, hidden_size], dtype)
        self._views: tuple[tuple[Any, ...], list[tuple[Any, Any]]] = ((), [])
        self.down = empty_parameter([len(self.placement.experts), hidden_size, local], dtype)

    def forward(self, x: Any) -> Any:
        if x.shape[0]:
            self._look_at_parameters()
            out = self._routed(x if self.narrow is None else self.narrow(x), *self.router(x))
            out = out if self.widen is None else self.widen(out)
        else:
            out = paddle.zeros_like(x)
        if self.shared is not None:
            out = ops.add(out, self.shared(x))
        return settle(out, self.owed, self.tp, self.prefix)

    def _routed(self, x: Any, weights: Any, expert_ids: Any) -> Any:
        """Each token's weighted sum over its local experts, in float32 up to the rounding at the end.

        Pairs (token, choice) are sorted by expert, so that each active expert runs once on consecutive rows.
        """
        num_tokens, top_k = expert_ids.shape
        if num_tokens == 1:
            return self._one_token(x, weights, expert_ids.tolist()[0])
        local_ids = expert_ids.numpy().reshape(-1) - self.placement.experts.start
        held = (local_ids >= 0) & (local_ids < len(self.placement.experts))
        order = np.argsort(np.where(held, local_ids, len(self.placement.experts)), kind="stable")[: int(held.sum())]
        if not len(order):
            return paddle.zeros_like(x)
        experts, starts = np.unique(local_ids[order], return_index=True)
        rows = paddle.gather(x, ops.tensor_of(order // top_k, x.place))
        ends = [*starts[1:].tolist(), len(order)]
        outputs = [
            self._expert(expert, rows[start:end])
            for expert, start, end in zip(experts.tolist(), starts.tolist(), ends, strict=True)
        ]
        stacked = ops.widen(paddle.concat(outputs))
        return self._combine(stacked, weights, order, num_tokens, top_k).astype(x.dtype)

    def _one_token(self, x: Any, weights: Any, expert_ids: list[int]) -> Any:
        """Decoding one sequence: no sorting, no gathering."""
        experts = self.placement.experts
        held = [choice for choice, expert in enumerate(expert_ids) if expert in experts]
        if not held:
            return paddle.zeros_like(x)
        stacked = ops.widen(paddle.concat([self._expert(expert_ids[k] - experts.start, x) for k in held]))
        if len(held) < len(expert_ids):
            weights = paddle.gather(weights, ops.tensor_of(held, x.place), axis=1)
        return ops.cast(paddle.matmul(ops.cast(weights, stacked.dtype), stacked), x.dtype)

    def _look_at_parameters(self) -> None:
        """Views of each expert's matrices, kept until a cast or a move gives the parameters new memory: taking one
        costs as much as a small matmul."""
        gate_up, down = self.gate_up, self.down
        where = (gate_up.data_ptr(), down.data_ptr(), gate_up.dtype)
        if self._views[0] != where:
            self._views = where, [(gate_up[i], down[i]) for i in range(len(self.placement.experts))]

    def _expert(self, expert: int, x: Any) -> Any:
        gate_up, down = self._views[1][expert]
        inner = ops.linear(x, gate_up)
        return ops.linear(ops.swiglu(inner) if self.gated else ops.squared_relu(inner), down)

    @staticmethod
    def _combine(stacked: Any, weights: Any, order: np.ndarray, num_tokens: int, top_k: int) -> Any:
        """Row ``i`` of ``stacked`` belongs to pair ``order[i]``; pairs that no local expert serves count as zero."""
        num_pairs = num_tokens * top_k
        if len(order) < num_pairs:
            stacked = paddle.concat([stacked, paddle.zeros([1, stacked.shape[1]], dtype=stacked.dtype)])
        place_of = np.full(num_pairs, len(order))
        place_of[order] = np.arange(len(order))
        pairs = paddle.gather(stacked, ops.tensor_of(place_of, stacked.place))
        pairs = pairs.reshape([num_tokens, top_k, -1])
        return paddle.matmul(ops.cast(weights, pairs.dtype).unsqueeze(1), pairs).squeeze(1)

    def own_tensors(self) -> list[TensorSpec]:
        """Experts held elsewhere are listed with nothing to read, so that every rank knows all names."""
        hidden, local = slice(0, self.hidden_size), self.columns.stop - self.columns.start
        wide, tall = (self.intermediate_size, self.hidden_size), (self.hidden_size, self.intermediate_size)
        own, specs = self.placement.experts, []
        for expert in range(self.num_experts):
            i, name = expert - own.start, f"{self.prefix}.{expert}"
            gate_up, down = (self.gate_up, self.down) if expert in own else (None, None)
            for at, part in enumerate(("gate_proj", "up_proj") if self.gated else ("up_proj",)):
                rows = (i, slice(at * local, (at + 1) * local), hidden)
                specs.append(TensorSpec(f"{name}.{part}.weight", wide, gate_up, rows, (self.columns, hidden)))
            down_part = (i, hidden, slice(0, local))
            specs.append(TensorSpec(f"{name}.down_proj.weight", tall, down, down_part, (hidden, self.columns)))
        return specs


def _check_placement(placement: ExpertPlacement, num_experts: int) -> None:
    experts = placement.experts
    if experts.step != 1 or not 0 <= experts.start <= experts.stop <= num_experts:
        raise ValueError(f"local experts {experts} are no range within {num_experts} experts; give range(first, end)")
    if not 0 <= placement.shard < placement.num_shards:
        raise ValueError(f"expert shard {placement.shard} is outside 0..{placement.num_shards - 1}; count from 0")
