"""DeepSeek-V3: multi-head latent attention, dense first layers, then experts routed in groups (``noaux_tc``).

Both sums of a layer are marked fusable, as in GLM4-MoE. A token leaves one latent vector in the cache, whatever the
number of heads; with YaRN, the attention's scale is corrected along with the frequencies.
"""

from typing import Any

from fastdeploy_fusion.errors import CheckpointError
from fastdeploy_fusion.layers import DecoderLayer, LatentAttention, LatentSizes, WeightedLayer

from .blocks import make_dense, make_moe
from .causal_lm import CausalLM


class DeepseekV3ForCausalLM(CausalLM):
    """One rank's part of the model. All ranks call every method alike."""

    @property
    def latent(self) -> LatentSizes:
        if self.config.latent is None:
            raise CheckpointError("config.json has no 'kv_lora_rank', which latent attention needs")
        return self.config.latent

    def make_layer(self, layer_id: int, prefix: str) -> DecoderLayer:
        c = self.config
        attention = LatentAttention(
            c.hidden_size,
            c.num_attention_heads,
            self.latent,
            c.rms_norm_eps,
            tp=self.tp,
            prefix=f"{prefix}.self_attn",
            layer_id=layer_id,
            softmax_factor=1.0 if c.yarn is None else c.yarn.softmax_factor,
            with_bias=c.attention_bias,
            dtype=self.dtype,
        )
        mlp: WeightedLayer
        if c.moe is not None and c.moe.in_layer(layer_id):
            mlp = make_moe(c.hidden_size, c.moe, parallel=self.parallel, prefix=f"{prefix}.mlp", dtype=self.dtype)
        else:
            mlp = make_dense(c, parallel=self.parallel, prefix=f"{prefix}.mlp", dtype=self.dtype)
        return self.frame(layer_id, prefix, attention, mlp)

    def kv_sizes(self) -> dict[str, Any]:
        """Latent vectors: one "head" on every rank, whose first elements are the values."""
        sizes = {"kv_heads": 1, "head_dim": self.latent.cached_dim, "latent_dim": self.latent.kv_lora_rank}
        return {"layers": self.stage.layers, "dtype": self.dtype, **sizes}
