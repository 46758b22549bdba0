"""Nemotron-H (Nemotron Nano): a hybrid of Mamba2, attention, MLP and MoE mixers, one norm and one sum a layer.

Every mixer's last projection is marked fusable: the next layer's norm, or the final one, consumes its sum, so that all
L sums of L layers are fused. Attention has no positions of its own: the Mamba layers around it know the order.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fastdeploy_fusion.layers import (
    AttentionStep,
    ContextSplit,
    FusedMoE,
    GroupedQueryAttention,
    KVCache,
    MambaMixer,
    MixerLayer,
    PackedBatch,
    ReplicatedLinear,
    RotaryEmbedding,
    SquaredReluMLP,
    StateCache,
    StateStep,
    WeightedLayer,
    split_heads,
)
from fastdeploy_fusion.sites import fusable

from .blocks import make_noaux_tc_router, place_experts
from .causal_lm import CausalLM
from .config import ModelConfig

if TYPE_CHECKING:
    from fastdeploy_fusion.parallel import Parallel


@dataclass(frozen=True)
class HybridCache:
    """``kv`` of the attention layers, ``states`` of the Mamba layers (None where this rank has none)."""

    kv: KVCache
    states: StateCache | None


@dataclass(frozen=True)
class HybridStep:
    """What attention and Mamba mixers each need to know about the batch."""

    attention: AttentionStep
    states: StateStep | None


class NemotronHForCausalLM(CausalLM):
    """One rank's part of the model. All ranks call every method alike."""

    embed_prefix = "backbone.embeddings"
    layers_prefix = "backbone.layers"
    norm_prefix = "backbone.norm_f"
    READS = {"mamba": "states", "attention": "attention", "mlp": None, "moe": None}
    """The part of the step that each kind of mixer takes."""

    def __init__(self, config: ModelConfig, parallel: "Parallel", dtype: str = "float32") -> None:
        if parallel.config.context_parallel_size > 1:
            raise ValueError(
                "a Mamba layer reads a prompt in order, so context_parallel_size "
                f"{parallel.config.context_parallel_size} has nothing to split; set it to 1"
            )
        super().__init__(config, parallel, dtype)

    def make_layer(self, layer_id: int, prefix: str) -> MixerLayer:
        kind = self.config.mixers[layer_id]
        make = {"mamba": self.make_mamba, "attention": self.make_attention, "mlp": self.make_mlp, "moe": self.make_moe}
        return MixerLayer(
            self.config.hidden_size,
            self.config.rms_norm_eps,
            make[kind](layer_id, f"{prefix}.mixer"),
            reads=self.READS[kind],
            tp=self.tp,
            prefix=prefix,
            layer_id=layer_id,
            dtype=self.dtype,
        )

    def make_mamba(self, layer_id: int, prefix: str) -> WeightedLayer:
        c = self.config
        assert c.mamba is not None  # there is a Mamba layer
        return MambaMixer(
            c.hidden_size, c.mamba, c.rms_norm_eps, tp=self.tp, prefix=prefix, layer_id=layer_id, dtype=self.dtype
        )

    def make_attention(self, layer_id: int, prefix: str) -> WeightedLayer:
        c = self.config
        return GroupedQueryAttention(
            c.hidden_size,
            c.head_dim,
            c.num_attention_heads,
            c.num_key_value_heads,
            tp=self.tp,
            prefix=prefix,
            layer_id=layer_id,
            qkv_bias=c.attention_bias,
            out_bias=c.attention_bias,
            dtype=self.dtype,
        )

    def make_mlp(self, layer_id: int, prefix: str) -> WeightedLayer:
        c = self.config
        return SquaredReluMLP(
            c.hidden_size,
            c.intermediate_size,
            tp=self.tp,
            prefix=prefix,
            down_prefix=fusable(f"{prefix}.down_proj"),
            with_bias=c.mlp_bias,
            dtype=self.dtype,
        )

    def make_moe(self, layer_id: int, prefix: str) -> WeightedLayer:
        """Experts without gates, routed as in DeepSeek-V3; in the larger models they work in a narrower hidden size."""
        c, moe, parallel = self.config, self.config.moe, self.parallel
        if moe is None:
            raise ValueError(f"layer {layer_id} has experts, but config.json has no n_routed_experts; add it")
        size, narrow, widen = c.hidden_size, None, None
        if moe.latent_size is not None:
            size = moe.latent_size
            narrow = ReplicatedLinear(c.hidden_size, size, prefix=f"{prefix}.fc1_latent_proj", dtype=self.dtype)
            widen = ReplicatedLinear(size, c.hidden_size, prefix=f"{prefix}.fc2_latent_proj", dtype=self.dtype)
        shared = None
        if moe.shared_size:
            shared = SquaredReluMLP(
                c.hidden_size,
                moe.shared_size,
                tp=parallel.moe,
                prefix=f"{prefix}.shared_experts",
                with_bias=c.mlp_bias,
                reduce_results=False,
                dtype=self.dtype,
            )
        return FusedMoE(
            size,
            moe.intermediate_size,
            moe.num_experts,
            tp=parallel.moe,
            prefix=fusable(f"{prefix}.experts"),
            router=make_noaux_tc_router(c.hidden_size, moe, prefix),
            shared=shared,
            placement=place_experts(moe, parallel),
            gated=False,
            narrow=narrow,
            widen=widen,
            dtype=self.dtype,
        )

    def make_rotary(self) -> RotaryEmbedding | None:
        return None

    def kv_sizes(self) -> dict[str, Any]:
        c, tp = self.config, self.tp
        heads = split_heads(c.num_attention_heads, c.num_key_value_heads, tp.rank, tp.world_size)
        sizes = {"kv_heads": heads.local_kv_heads, "head_dim": c.head_dim}
        return {"layers": self._layers_of("attention"), "dtype": self.dtype, **sizes}

    def cache_around(self, kv: KVCache, num_slots: int) -> HybridCache:
        """Keys and values grow with the text; the Mamba layers' states do not."""
        mixers = [layer.mixer for layer in self.layers if isinstance(layer.mixer, MambaMixer)]
        states = mixers[0].new_cache(self._layers_of("mamba"), num_slots) if mixers else None
        return HybridCache(kv, states)

    def new_step(self, batch: PackedBatch, cache: HybridCache, split: ContextSplit) -> HybridStep:
        states = None if cache.states is None else StateStep(batch, cache.states)
        return HybridStep(AttentionStep(batch, cache.kv, None), states)

    def _layers_of(self, kind: str) -> list[int]:
        return [layer for layer in self.stage.layers if self.config.mixers[layer] == kind]
