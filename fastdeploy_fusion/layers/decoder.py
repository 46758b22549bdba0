"""The frame of a decoder layer, and how its last sum crosses into the next layer."""

from functools import partial
from typing import TYPE_CHECKING, Any

from ..partial import PartialSum
from .norm import RMSNorm
from .parameter import WeightedLayer

if TYPE_CHECKING:
    from ..fusion import AllReduceFusion


def complete(hidden: Any) -> Any:
    """``hidden`` as a tensor: the sum over ranks, where it is still owed. For every reader that is not a norm.

    Then all ranks of the group must call it alike.
    """
    return hidden.complete() if isinstance(hidden, PartialSum) else hidden


class DecoderLayer(WeightedLayer):
    """``x + attention(norm(x))``, then ``x + mlp(norm(x))``: two norms, two sums.

    ``forward(hidden, residual, step, taps) -> (hidden, residual)``; ``residual`` is None before the first layer. Where
    ``tp`` defers, ``hidden`` comes and goes as a ``PartialSum``: the norm of the next layer, or the final one, takes it
    as it is; whatever else reads it calls ``complete`` first.

    ``taps``, a list, gets the residual stream before this layer. The input norm has just completed it, so looking at it
    costs no reduction. ``crosses`` False completes the last sum here, to measure what its crossing is worth.
    """

    def __init__(
        self,
        hidden_size: int,
        eps: float,
        attention: WeightedLayer,
        mlp: WeightedLayer,
        *,
        tp: "AllReduceFusion",
        prefix: str,
        layer_id: int,
        dtype: str = "float32",
    ) -> None:
        super().__init__()
        norm = partial(RMSNorm, hidden_size, eps, tp=tp, dtype=dtype, layer_id=layer_id)
        self.input_layernorm = norm(prefix=f"{prefix}.input_layernorm")
        self.self_attn = attention
        self.post_attention_layernorm = norm(prefix=f"{prefix}.post_attention_layernorm")
        self.mlp = mlp
        self.crosses = True

    def forward(self, hidden: Any, residual: Any, step: Any, taps: list[Any] | None = None) -> tuple[Any, Any]:
        hidden, residual = self.input_layernorm(hidden, residual)
        if taps is not None:
            taps.append(residual)
        hidden, residual = self.post_attention_layernorm(self.self_attn(hidden, step), residual)
        hidden = self.mlp(hidden)
        return hidden if self.crosses else complete(hidden), residual


class MixerLayer(WeightedLayer):
    """``x + mixer(norm(x))``: one norm, one sum, of hybrid decoders. ``forward`` as of ``DecoderLayer``.

    ``reads``: the attribute of the step that the mixer takes besides its input; None: it sees each token alone.
    """

    def __init__(
        self,
        hidden_size: int,
        eps: float,
        mixer: WeightedLayer,
        *,
        reads: str | None,
        tp: "AllReduceFusion",
        prefix: str,
        layer_id: int,
        dtype: str = "float32",
    ) -> None:
        super().__init__()
        self.norm = RMSNorm(hidden_size, eps, tp=tp, prefix=f"{prefix}.norm", dtype=dtype, layer_id=layer_id)
        self.mixer, self.reads = mixer, reads

    def forward(self, hidden: Any, residual: Any, step: Any, taps: list[Any] | None = None) -> tuple[Any, Any]:
        hidden, residual = self.norm(hidden, residual)
        if taps is not None:
            taps.append(residual)
        hidden = self.mixer(hidden) if self.reads is None else self.mixer(hidden, getattr(step, self.reads))
        return hidden, residual
