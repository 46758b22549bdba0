"""Linear layers, split over the ranks of ``tp``. Weights keep the checkpoint's layout ``[out, in]``."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..sites import parse_site
from . import ops
from .parameter import TensorSpec, WeightedLayer, empty_parameter
from .shards import shard_slice, split_evenly, split_heads
from .sums import owed_sum, settle

if TYPE_CHECKING:
    from ..fusion import AllReduceFusion


class RowParallelLinear(WeightedLayer):
    """Split over the input axis: each rank multiplies its columns, and the ranks' results have to be added up.

    ``forward(x [..., input_size / ranks])`` returns, at a prefix marked ``fusable`` when ``tp`` defers, a
    ``PartialSum``; with ``reduce_results=False`` this rank's unreduced tensor, for a caller that owns the sum; else the
    complete tensor, and all ranks of the group must call it alike. The bias is added once, on rank 0.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        tp: "AllReduceFusion",
        prefix: str,
        with_bias: bool = False,
        reduce_results: bool = True,
        dtype: str = "float32",
    ) -> None:
        super().__init__()
        site = parse_site(prefix)
        self.prefix = site.weight_prefix
        self.tp = tp
        self.owed = owed_sum(site, tp, reduce_results)
        self.columns = shard_slice(input_size, tp.rank, tp.world_size, f"input size of {self.prefix!r}")
        self.input_size, self.output_size, self.with_bias = input_size, output_size, with_bias
        self.weight = empty_parameter([output_size, self.columns.stop - self.columns.start], dtype)
        self.bias = empty_parameter([output_size], dtype) if with_bias and tp.rank == 0 else None

    def forward(self, x: Any) -> Any:
        return settle(ops.linear(x, self.weight, self.bias), self.owed, self.tp, self.prefix)

    def own_tensors(self) -> list[TensorSpec]:
        rows, local = slice(0, self.output_size), slice(0, self.weight.shape[1])
        shape = (self.output_size, self.input_size)
        specs = [TensorSpec(f"{self.prefix}.weight", shape, self.weight, (rows, local), (rows, self.columns))]
        if self.with_bias:
            specs.append(TensorSpec(f"{self.prefix}.bias", (self.output_size,), self.bias, (rows,), (rows,)))
        return specs


class ShardedLinear(WeightedLayer):
    """Rows of one or several stored matrices, stacked in one local weight ``[sum of local rows, input_size]``.

    ``parts``: ``(stored prefix, stored rows, slice of them that this rank holds)``.
    """

    def __init__(self, input_size: int, parts: Sequence[tuple[str, int, slice]], with_bias: bool, dtype: str) -> None:
        super().__init__()
        if input_size <= 0:
            raise ValueError(f"input size of {parts[0][0]!r} is {input_size}; it must be positive")
        self.input_size = input_size
        self.parts = tuple(parts)
        self.local_sizes = [rows.stop - rows.start for _, _, rows in self.parts]
        self.weight = empty_parameter([sum(self.local_sizes), input_size], dtype)
        self.bias = empty_parameter([sum(self.local_sizes)], dtype) if with_bias else None

    def forward(self, x: Any) -> Any:
        return ops.linear(x, self.weight, self.bias)

    def own_tensors(self) -> list[TensorSpec]:
        specs = []
        every = slice(0, self.input_size)
        start = 0
        for (prefix, total, rows), local in zip(self.parts, self.local_sizes, strict=True):
            into = slice(start, start + local)
            start += local
            shape = (total, self.input_size)
            specs.append(TensorSpec(f"{prefix}.weight", shape, self.weight, (into, every), (rows, every)))
            if self.bias is not None:
                specs.append(TensorSpec(f"{prefix}.bias", (total,), self.bias, (into,), (rows,)))
        return specs


class ReplicatedLinear(ShardedLinear):
    """The whole matrix on every rank: ``x [..., input_size] -> [..., output_size]``."""

    def __init__(
        self, input_size: int, output_size: int, *, prefix: str, with_bias: bool = False, dtype: str = "float32"
    ) -> None:
        prefix = parse_site(prefix).weight_prefix
        split_evenly(output_size, 1, f"output size of {prefix!r}")
        super().__init__(input_size, [(prefix, output_size, slice(0, output_size))], with_bias, dtype)


class MergedColumnParallelLinear(ShardedLinear):
    """Several matrices of one input, each split over its output axis, in one matmul.

    ``shard_keys`` replace the last segment of ``prefix``: ``model.layers.0.mlp.gate_up_proj`` with
    ``("gate_proj", "up_proj")`` reads ``model.layers.0.mlp.gate_proj.weight`` and its neighbour. The local result holds
    this rank's part of each, in that order.
    """

    def __init__(
        self,
        input_size: int,
        output_sizes: Sequence[int],
        *,
        tp: "AllReduceFusion",
        prefix: str,
        shard_keys: Sequence[str],
        with_bias: bool = False,
        dtype: str = "float32",
    ) -> None:
        if not output_sizes or len(output_sizes) != len(shard_keys):
            raise ValueError(f"{len(output_sizes)} output_sizes for {len(shard_keys)} shard_keys; give one size a key")
        prefixes = [_sibling(prefix, key) for key in shard_keys]
        parts = [
            (key, size, shard_slice(size, tp.rank, tp.world_size, f"output size of {key!r}"))
            for key, size in zip(prefixes, output_sizes, strict=True)
        ]
        super().__init__(input_size, parts, with_bias, dtype)


class ColumnParallelLinear(MergedColumnParallelLinear):
    """Split over the output axis: ``x [..., input_size] -> [..., output_size / ranks]``; no reduction is owed.

    With ``gather_output`` every rank returns all ``output_size`` columns, and all must call it alike.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        tp: "AllReduceFusion",
        prefix: str,
        with_bias: bool = False,
        gather_output: bool = False,
        dtype: str = "float32",
    ) -> None:
        name = parse_site(prefix).weight_prefix.rpartition(".")[2]
        super().__init__(
            input_size, [output_size], tp=tp, prefix=prefix, shard_keys=[name], with_bias=with_bias, dtype=dtype
        )
        self.tp = tp
        self.gather_output = gather_output and tp.world_size > 1

    def forward(self, x: Any) -> Any:
        out = super().forward(x)
        return self.tp.all_gather(out) if self.gather_output else out


class QKVParallelLinear(ShardedLinear):
    """Query, key and value projections of this rank's heads in one matmul.

    Result: ``[..., (local_heads + 2 * local_kv_heads) * head_dim]``, queries first, then keys, then values. With fewer
    kv heads than ranks, each kv head is held by several ranks, next to the query heads that use it.
    """

    def __init__(
        self,
        input_size: int,
        head_dim: int,
        total_heads: int,
        total_kv_heads: int,
        *,
        tp: "AllReduceFusion",
        prefix: str,
        shard_keys: Sequence[str] = ("q_proj", "k_proj", "v_proj"),
        with_bias: bool = False,
        dtype: str = "float32",
    ) -> None:
        split = split_heads(total_heads, total_kv_heads, tp.rank, tp.world_size)
        heads = [(total_heads, split.q), (total_kv_heads, split.kv), (total_kv_heads, split.kv)]
        parts = [
            (_sibling(prefix, key), total * head_dim, slice(own.start * head_dim, own.stop * head_dim))
            for key, (total, own) in zip(shard_keys, heads, strict=True)
        ]
        super().__init__(input_size, parts, with_bias, dtype)
        self.head_dim, self.local_heads, self.local_kv_heads = head_dim, split.local_heads, split.local_kv_heads


def _sibling(prefix: str, name: str) -> str:
    parent = parse_site(prefix).weight_prefix.rpartition(".")[0]
    return f"{parent}.{name}" if parent else name
