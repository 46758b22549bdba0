"""GLM4-MoE (GLM-4.5, GLM-4.6): grouped-query attention with partial rotary, dense first layers, then experts.

Each decoder layer owes two sums, both marked fusable. The norm after the attention consumes the attention's; the next
layer's input norm, or the final norm, consumes the MLP's. So all 2L sums of L layers are fused. Under pipeline
parallelism the last sum of a stage is completed for the next stage.
"""

from fastdeploy_fusion.layers import DecoderLayer, GroupedQueryAttention, WeightedLayer

from .blocks import make_dense, make_moe
from .causal_lm import CausalLM


class Glm4MoeForCausalLM(CausalLM):
    """One rank's part of the model. All ranks call every method alike."""

    def make_layer(self, layer_id: int, prefix: str) -> DecoderLayer:
        c, parallel, dtype = self.config, self.parallel, self.dtype
        attention = GroupedQueryAttention(
            c.hidden_size,
            c.head_dim,
            c.num_attention_heads,
            c.num_key_value_heads,
            tp=parallel.tp,
            prefix=f"{prefix}.self_attn",
            layer_id=layer_id,
            qkv_bias=c.attention_bias,
            qk_norm_eps=c.rms_norm_eps if c.use_qk_norm else None,
            dtype=dtype,
        )
        mlp: WeightedLayer
        if c.moe is None or not c.moe.in_layer(layer_id):
            mlp = make_dense(c, parallel=parallel, prefix=f"{prefix}.mlp", dtype=dtype)
        else:
            mlp = make_moe(c.hidden_size, c.moe, parallel=parallel, prefix=f"{prefix}.mlp", dtype=dtype)
        return self.frame(layer_id, prefix, attention, mlp)
