"""Grouped-query attention, as most decoders have it: one matmul in, heads of this rank, one owed sum out."""

from typing import TYPE_CHECKING, Any

from ..sites import fusable
from .attention import AttentionStep
from .linear import QKVParallelLinear, RowParallelLinear
from .norm import RMSNorm
from .parameter import WeightedLayer

if TYPE_CHECKING:
    from ..fusion import AllReduceFusion


class GroupedQueryAttention(WeightedLayer):
    """``forward(hidden [num_tokens, hidden_size], step)`` returns ``o_proj``'s sum, marked fusable.

    ``layer_id``: the layer's number in the KV cache. ``qk_norm_eps``: normalise each query and key head before it is
    rotated; None: don't. Rotation is as the step says.
    """

    def __init__(
        self,
        hidden_size: int,
        head_dim: int,
        num_heads: int,
        num_kv_heads: int,
        *,
        tp: "AllReduceFusion",
        prefix: str,
        layer_id: int,
        qkv_bias: bool = False,
        out_bias: bool = False,
        qk_norm_eps: float | None = None,
        dtype: str = "float32",
    ) -> None:
        super().__init__()
        self.layer_id, self.head_dim, self.scale = layer_id, head_dim, head_dim**-0.5
        self.qkv_proj = QKVParallelLinear(
            hidden_size,
            head_dim,
            num_heads,
            num_kv_heads,
            tp=tp,
            prefix=f"{prefix}.qkv_proj",
            with_bias=qkv_bias,
            dtype=dtype,
        )
        self.o_proj = RowParallelLinear(
            num_heads * head_dim,
            hidden_size,
            tp=tp,
            prefix=fusable(f"{prefix}.o_proj"),
            with_bias=out_bias,
            dtype=dtype,
        )
        self.heads, self.kv_heads = self.qkv_proj.local_heads, self.qkv_proj.local_kv_heads
        self.use_qk_norm = qk_norm_eps is not None
        if qk_norm_eps is not None:
            self.q_norm = RMSNorm(head_dim, qk_norm_eps, prefix=f"{prefix}.q_norm", dtype=dtype)
            self.k_norm = RMSNorm(head_dim, qk_norm_eps, prefix=f"{prefix}.k_norm", dtype=dtype)

    def forward(self, hidden: Any, step: AttentionStep) -> Any:
        qkv = self.qkv_proj(hidden).reshape([hidden.shape[0], self.heads + 2 * self.kv_heads, self.head_dim])
        both = self.heads + self.kv_heads
        if self.use_qk_norm:
            q, k = self.q_norm(qkv[:, : self.heads])[0], self.k_norm(qkv[:, self.heads : both])[0]
            q, k = step.rotate(q), step.rotate(k)
        else:
            qk = step.rotate(qkv[:, :both])
            q, k = qk[:, : self.heads], qk[:, self.heads :]
        return self.o_proj(step.attend(self.layer_id, q, k, qkv[:, both:], self.scale))
