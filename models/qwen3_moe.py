"""Qwen3-MoE: grouped-query attention with normalised queries and keys, softmax routing, no shared experts.

Both sums of a layer are marked fusable, as in GLM4-MoE. Layers of ``mlp_only_layers``, and those that
``decoder_sparse_step`` passes over, have a dense MLP.
"""

from fastdeploy_fusion.layers import DecoderLayer, FusedMoE, GroupedQueryAttention, SoftmaxRouter, WeightedLayer
from fastdeploy_fusion.sites import fusable

from .blocks import make_dense, place_experts
from .causal_lm import CausalLM
from .config import MoeConfig


class Qwen3MoeForCausalLM(CausalLM):
    """One rank's part of the model. All ranks call every method alike."""

    def make_layer(self, layer_id: int, prefix: str) -> DecoderLayer:
        c = self.config
        attention = GroupedQueryAttention(
            c.hidden_size,
            c.head_dim,
            c.num_attention_heads,
            c.num_key_value_heads,
            tp=self.tp,
            prefix=f"{prefix}.self_attn",
            layer_id=layer_id,
            qkv_bias=c.attention_bias,
            out_bias=c.attention_bias,
            qk_norm_eps=c.rms_norm_eps if c.use_qk_norm else None,
            dtype=self.dtype,
        )
        mlp: WeightedLayer
        if c.moe is not None and c.moe.in_layer(layer_id):
            mlp = self.make_experts(c.moe, f"{prefix}.mlp")
        else:
            mlp = make_dense(c, parallel=self.parallel, prefix=f"{prefix}.mlp", dtype=self.dtype)
        return self.frame(layer_id, prefix, attention, mlp)

    def make_experts(self, moe: MoeConfig, prefix: str) -> FusedMoE:
        """The router's weights are softmax probabilities, of which only the chosen ones count."""
        size = self.config.hidden_size
        return FusedMoE(
            size,
            moe.intermediate_size,
            moe.num_experts,
            tp=self.parallel.moe,
            prefix=fusable(f"{prefix}.experts"),
            router=SoftmaxRouter(
                size,
                moe.num_experts,
                top_k=moe.num_experts_per_tok,
                norm_topk_prob=moe.norm_topk_prob,
                prefix=f"{prefix}.gate",
            ),
            placement=place_experts(moe, self.parallel),
            dtype=self.dtype,
        )
