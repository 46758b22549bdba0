"""RMSNorm that takes a complete tensor or a sum that is still owed."""

from typing import TYPE_CHECKING, Any

from ..backends.plain import add_rms_norm
from ..partial import PartialSum
from ..sites import parse_site
from . import ops
from .parameter import TensorSpec, WeightedLayer, empty_parameter

if TYPE_CHECKING:
    from ..fusion import AllReduceFusion


class RMSNorm(WeightedLayer):
    """``forward(x, residual) -> (norm_out, residual_out)``, with ``residual_out = x + residual``.

    ``x`` is ``[num_tokens, hidden_size]``. Given a ``PartialSum``, the sum over ranks, the addition and the norm are
    one step of ``tp``; then every rank of the group must call it alike. Given a tensor (any leading axes), it is local.
    Sum and norm are computed in float32; the weight's dtype may differ from the activation's. ``weight_bias`` is added
    to the weight as it is stored (1 in Gemma). ``layer_id`` is FastDeploy's, and of no consequence here.
    """

    def __init__(
        self,
        hidden_size: int,
        eps: float,
        *,
        tp: "AllReduceFusion | None" = None,
        prefix: str,
        dtype: str = "float32",
        layer_id: int | None = None,
        weight_bias: float = 0.0,
    ) -> None:
        super().__init__()
        if hidden_size <= 0:
            raise ValueError(f"hidden_size of {prefix!r} is {hidden_size}; it must be positive")
        self.hidden_size = hidden_size
        self.eps = eps
        self.tp = tp
        self.layer_id = layer_id
        self.weight_bias = weight_bias
        self.key = parse_site(prefix).weight_prefix + ".weight"
        self.weight = empty_parameter([hidden_size], dtype)

    def forward(self, x: Any, residual: Any = None) -> tuple[Any, Any]:
        if isinstance(x, PartialSum):
            tp = self.tp if self.tp is not None else x.fusion
            return tp.add_rms_norm(x, residual, self.weight, self.eps, self.weight_bias)
        if x.shape[-1] != self.hidden_size:
            raise ValueError(f"last axis of x is {x.shape[-1]}, but the norm {self.key!r} is over {self.hidden_size}")
        if residual is not None and residual.shape != x.shape:
            raise ValueError(
                f"residual {list(residual.shape)} and x {list(x.shape)} differ in shape; they are added row by row"
            )
        norm_out, residual_out = add_rms_norm(x, residual, self.weight, self.eps, self.weight_bias)
        return ops.cast(norm_out, x.dtype), x if residual is None else ops.cast(residual_out, x.dtype)

    def own_tensors(self) -> list[TensorSpec]:
        whole = (slice(0, self.hidden_size),)
        return [TensorSpec(self.key, (self.hidden_size,), self.weight, whole, whole)]
