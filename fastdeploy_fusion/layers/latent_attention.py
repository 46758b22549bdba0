"""Multi-head latent attention (DeepSeek-V2): keys and values of all heads are kept as one small vector a token."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import paddle

from ..sites import fusable
from . import ops
from .attention import AttentionStep
from .linear import ColumnParallelLinear, ReplicatedLinear, RowParallelLinear
from .norm import RMSNorm
from .parameter import WeightedLayer
from .shards import split_heads

if TYPE_CHECKING:
    from ..fusion import AllReduceFusion


@dataclass(frozen=True)
class LatentSizes:
    """``q_lora_rank`` None: queries come from the hidden states in one projection. A key has ``qk_nope_head_dim``
    elements that come from the latent vector of ``kv_lora_rank``, and ``qk_rope_head_dim`` rotated ones.
    """

    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def cached_dim(self) -> int:
        """Elements kept of a token: the latent vector, then the rotated part of the key."""
        return self.kv_lora_rank + self.qk_rope_head_dim


class LatentAttention(WeightedLayer):
    """``forward(hidden [num_tokens, hidden_size], step)`` returns ``o_proj``'s sum, marked fusable.

    Heads are split over the ranks; the latent vectors are computed and kept on every rank. ``kv_b_proj`` is never
    applied to them: its key half turns a query into the latent space, where it meets the cached vector of
    ``cached_dim`` as of one shared head, and its value half turns the weighted latent vectors into values.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        sizes: LatentSizes,
        eps: float,
        *,
        tp: "AllReduceFusion",
        prefix: str,
        layer_id: int,
        softmax_factor: float = 1.0,
        with_bias: bool = False,
        dtype: str = "float32",
    ) -> None:
        """``with_bias``: on ``q_a_proj``, ``kv_a_proj_with_mqa`` and ``o_proj``, as ``attention_bias`` says."""
        super().__init__()
        s = sizes
        self.layer_id, self.sizes = layer_id, sizes
        self.scale = s.qk_head_dim**-0.5 * softmax_factor
        self.heads = split_heads(num_heads, num_heads, tp.rank, tp.world_size).local_heads
        if s.q_lora_rank is None:
            self.q_proj = ColumnParallelLinear(
                hidden_size, num_heads * s.qk_head_dim, tp=tp, prefix=f"{prefix}.q_proj", dtype=dtype
            )
        else:
            self.q_a_proj = ReplicatedLinear(
                hidden_size, s.q_lora_rank, prefix=f"{prefix}.q_a_proj", with_bias=with_bias, dtype=dtype
            )
            self.q_a_layernorm = RMSNorm(s.q_lora_rank, eps, prefix=f"{prefix}.q_a_layernorm", dtype=dtype)
            self.q_b_proj = ColumnParallelLinear(
                s.q_lora_rank, num_heads * s.qk_head_dim, tp=tp, prefix=f"{prefix}.q_b_proj", dtype=dtype
            )
        self.kv_a_proj_with_mqa = ReplicatedLinear(
            hidden_size, s.cached_dim, prefix=f"{prefix}.kv_a_proj_with_mqa", with_bias=with_bias, dtype=dtype
        )
        self.kv_a_layernorm = RMSNorm(s.kv_lora_rank, eps, prefix=f"{prefix}.kv_a_layernorm", dtype=dtype)
        kv_size = num_heads * (s.qk_nope_head_dim + s.v_head_dim)
        self.kv_b_proj = ColumnParallelLinear(s.kv_lora_rank, kv_size, tp=tp, prefix=f"{prefix}.kv_b_proj", dtype=dtype)
        self.o_proj = RowParallelLinear(
            num_heads * s.v_head_dim,
            hidden_size,
            tp=tp,
            prefix=fusable(f"{prefix}.o_proj"),
            with_bias=with_bias,
            dtype=dtype,
        )

    def forward(self, hidden: Any, step: AttentionStep) -> Any:
        s, num_tokens = self.sizes, hidden.shape[0]
        q = self._queries(hidden).reshape([num_tokens, self.heads, s.qk_head_dim])
        compressed = self.kv_a_proj_with_mqa(hidden)
        latent = self.kv_a_layernorm(compressed[:, : s.kv_lora_rank])[0]
        kv_b = self.kv_b_proj.weight.reshape([self.heads, s.qk_nope_head_dim + s.v_head_dim, s.kv_lora_rank])
        to_latent, to_value = kv_b[:, : s.qk_nope_head_dim], kv_b[:, s.qk_nope_head_dim :]
        q_latent = ops.per_head(q[:, :, : s.qk_nope_head_dim], to_latent)
        queries = paddle.concat([q_latent, step.rotate(q[:, :, s.qk_nope_head_dim :])], axis=-1)
        rotated = step.rotate(compressed[:, s.kv_lora_rank :].unsqueeze(1))
        keys = paddle.concat([latent.unsqueeze(1), rotated], axis=-1)
        mixed = step.attend(self.layer_id, queries, keys, None, self.scale)
        mixed = mixed.reshape([num_tokens, self.heads, s.kv_lora_rank])
        values = ops.per_head(mixed, to_value, transpose=True)
        return self.o_proj(values.reshape([num_tokens, self.heads * s.v_head_dim]))

    def _queries(self, hidden: Any) -> Any:
        if self.sizes.q_lora_rank is None:
            return self.q_proj(hidden)
        return self.q_b_proj(self.q_a_layernorm(self.q_a_proj(hidden))[0])
