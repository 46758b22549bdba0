"""Feed-forward blocks. Each owes one sum over ranks, returned as ``RowParallelLinear`` returns it."""

from typing import TYPE_CHECKING, Any

from . import ops
from .linear import ColumnParallelLinear, MergedColumnParallelLinear, RowParallelLinear
from .parameter import WeightedLayer

if TYPE_CHECKING:
    from ..fusion import AllReduceFusion


class GatedMLP(WeightedLayer):
    """``down(silu(gate(x)) * up(x))``, of most of today's decoders.

    ``prefix`` is the block's (``model.layers.0.mlp``); ``down_prefix`` replaces the down projection's, to mark it.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        tp: "AllReduceFusion",
        prefix: str,
        down_prefix: str | None = None,
        reduce_results: bool = True,
        dtype: str = "float32",
    ) -> None:
        super().__init__()
        self.gate_up_proj = MergedColumnParallelLinear(
            hidden_size,
            [intermediate_size, intermediate_size],
            tp=tp,
            prefix=f"{prefix}.gate_up_proj",
            shard_keys=["gate_proj", "up_proj"],
            dtype=dtype,
        )
        self.down_proj = RowParallelLinear(
            intermediate_size,
            hidden_size,
            tp=tp,
            prefix=down_prefix or f"{prefix}.down_proj",
            reduce_results=reduce_results,
            dtype=dtype,
        )

    def forward(self, x: Any) -> Any:
        return self.down_proj(ops.swiglu(self.gate_up_proj(x)))


class SquaredReluMLP(WeightedLayer):
    """``down(max(up(x), 0) ** 2)``, of Nemotron-H. ``prefix`` and ``down_prefix`` as of ``GatedMLP``."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        tp: "AllReduceFusion",
        prefix: str,
        down_prefix: str | None = None,
        with_bias: bool = False,
        reduce_results: bool = True,
        dtype: str = "float32",
    ) -> None:
        super().__init__()
        self.up_proj = ColumnParallelLinear(
            hidden_size, intermediate_size, tp=tp, prefix=f"{prefix}.up_proj", with_bias=with_bias, dtype=dtype
        )
        self.down_proj = RowParallelLinear(
            intermediate_size,
            hidden_size,
            tp=tp,
            prefix=down_prefix or f"{prefix}.down_proj",
            with_bias=with_bias,
            reduce_results=reduce_results,
            dtype=dtype,
        )

    def forward(self, x: Any) -> Any:
        return self.down_proj(ops.squared_relu(self.up_proj(x)))
