"""GLM4-MoE (GLM-4.5, GLM-4.6): grouped-query attention with partial rotary, dense first layers, then experts.

Each decoder layer owes two sums, both marked fusable. The norm after the attention consumes the attention's; the next
layer's input norm, or the final norm, consumes the MLP's. So all 2L sums of L layers are fused. Under pipeline
parallelism the last sum of a stage is completed for the next stage.
"""

from functools import partial
from typing import TYPE_CHECKING, Any

from paddle import nn

from fastdeploy_fusion.layers import (
    AttentionStep,
    ContextSplit,
    ExpertPlacement,
    FusedMoE,
    GatedMLP,
    KVCache,
    NoAuxTcRouter,
    PackedBatch,
    ParallelLMHead,
    PipelineStage,
    QKVParallelLinear,
    RMSNorm,
    RotaryEmbedding,
    RowParallelLinear,
    VocabParallelEmbedding,
    WeightedLayer,
)
from fastdeploy_fusion.sites import fusable

from .config import ModelConfig, MoeConfig

if TYPE_CHECKING:
    from fastdeploy_fusion.fusion import AllReduceFusion
    from fastdeploy_fusion.parallel import Parallel


class Glm4MoeAttention(WeightedLayer):
    """Attention of one layer; returns the sum of ``o_proj``, owed to the next norm where ``tp`` defers."""

    def __init__(self, config: ModelConfig, layer_id: int, *, tp: "AllReduceFusion", prefix: str, dtype: str) -> None:
        super().__init__()
        self.layer_id = layer_id
        self.scale = config.head_dim**-0.5
        self.qkv_proj = QKVParallelLinear(
            config.hidden_size,
            config.head_dim,
            config.num_attention_heads,
            config.num_key_value_heads,
            tp=tp,
            prefix=f"{prefix}.qkv_proj",
            with_bias=config.attention_bias,
            dtype=dtype,
        )
        self.o_proj = RowParallelLinear(
            config.num_attention_heads * config.head_dim,
            config.hidden_size,
            tp=tp,
            prefix=fusable(f"{prefix}.o_proj"),
            dtype=dtype,
        )
        self.heads, self.kv_heads = self.qkv_proj.local_heads, self.qkv_proj.local_kv_heads
        self.use_qk_norm = config.use_qk_norm
        if config.use_qk_norm:
            self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps, prefix=f"{prefix}.q_norm", dtype=dtype)
            self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps, prefix=f"{prefix}.k_norm", dtype=dtype)
        self.head_dim = config.head_dim

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


class Glm4MoeDecoderLayer(WeightedLayer):
    """``forward(hidden, residual, step) -> (hidden, residual)``; ``residual`` is None before the first layer.

    Where ``tp`` defers, ``hidden`` comes back as a ``PartialSum``: the next norm takes it as it is, and whatever else
    reads it calls ``complete()`` first.
    """

    def __init__(self, config: ModelConfig, layer_id: int, *, parallel: "Parallel", prefix: str, dtype: str) -> None:
        super().__init__()
        size, tp = config.hidden_size, parallel.tp
        norm = partial(RMSNorm, size, config.rms_norm_eps, tp=tp, dtype=dtype, layer_id=layer_id)
        self.input_layernorm = norm(prefix=f"{prefix}.input_layernorm")
        self.self_attn = Glm4MoeAttention(config, layer_id, tp=tp, prefix=f"{prefix}.self_attn", dtype=dtype)
        self.post_attention_layernorm = norm(prefix=f"{prefix}.post_attention_layernorm")
        if config.moe is None or layer_id < config.moe.first_k_dense_replace:
            self.mlp = GatedMLP(
                size,
                config.intermediate_size,
                tp=tp,
                prefix=f"{prefix}.mlp",
                down_prefix=fusable(f"{prefix}.mlp.down_proj"),
                dtype=dtype,
            )
        else:
            placement = ExpertPlacement.dealt(config.moe.num_experts, parallel.place, parallel.config)
            self.mlp = make_moe(
                size, config.moe, tp=parallel.moe, placement=placement, prefix=f"{prefix}.mlp", dtype=dtype
            )

    def forward(self, hidden: Any, residual: Any, step: AttentionStep) -> tuple[Any, Any]:
        hidden, residual = self.input_layernorm(hidden, residual)
        hidden, residual = self.post_attention_layernorm(self.self_attn(hidden, step), residual)
        return self.mlp(hidden), residual


class Glm4MoeForCausalLM(WeightedLayer):
    """One rank's part of the model: its stage's layers, its shards of them. All ranks call every method alike."""

    takes_layout = True

    def __init__(self, config: ModelConfig, parallel: "Parallel", dtype: str = "float32") -> None:
        super().__init__()
        self.config, self.parallel, self.tp, self.dtype = config, parallel, parallel.tp, dtype
        self.stage = PipelineStage(parallel.pipeline, config.num_hidden_layers)
        vocab_size, size, tied = config.vocab_size, config.hidden_size, config.tie_word_embeddings
        shared: dict[str, Any] = {"tp": parallel.tp, "dtype": dtype}
        if self.stage.is_first or (self.stage.is_last and tied):
            self.embed_tokens = VocabParallelEmbedding(vocab_size, size, prefix="model.embed_tokens", **shared)
        self.layers = nn.LayerList(
            [
                Glm4MoeDecoderLayer(config, i, parallel=parallel, prefix=f"model.layers.{i}", dtype=dtype)
                for i in self.stage.layers
            ]
        )
        if self.stage.is_last:
            self.norm = RMSNorm(size, config.rms_norm_eps, prefix="model.norm", **shared)
            tied_to = self.embed_tokens if tied else None
            self.lm_head = ParallelLMHead(vocab_size, size, prefix="lm_head", tied_to=tied_to, **shared)
        self.tied_head_key = "lm_head.weight" if tied else None
        self.rotary = RotaryEmbedding(config.rotary_dim, config.rope_theta)

    def new_cache(self, num_slots: int, max_tokens: int) -> KVCache:
        """An empty cache for ``num_slots`` sequences of up to ``max_tokens`` on this rank."""
        return KVCache(
            num_layers=len(self.layers),
            first_layer=self.stage.layers.start,
            num_slots=num_slots,
            max_tokens=max_tokens,
            kv_heads=self.layers[0].self_attn.kv_heads,
            head_dim=self.config.head_dim,
            dtype=self.dtype,
        )

    def forward(self, token_ids: Any, batch: PackedBatch, cache: KVCache) -> Any:
        """``token_ids [num_tokens]`` int64, packed as ``batch`` says, to normalised states ``[num_tokens, hidden]``.

        The new tokens' keys and values are left in ``cache``. Stages before the last return None.
        """
        split = ContextSplit(batch, self.parallel.context)
        step = AttentionStep(batch, cache, self.rotary, split)
        if self.stage.is_first:
            hidden = self.embed_tokens(split.take(token_ids))
        else:
            hidden = self.stage.receive([split.local.num_tokens, self.config.hidden_size], self.dtype)
        residual = None
        for layer in self.layers:
            hidden, residual = layer(hidden, residual, step)
        if not self.stage.is_last:
            self.stage.send(hidden, residual)
            return None
        return split.gather(self.norm(hidden, residual)[0])

    def logits(self, hidden: Any) -> Any:
        """float32 ``[rows, vocab_size]`` for rows of ``forward``'s result, the same bytes on every rank."""
        return self.lm_head(hidden)


def make_moe(
    hidden_size: int,
    moe: MoeConfig,
    *,
    tp: "AllReduceFusion",
    placement: ExpertPlacement | None = None,
    prefix: str,
    dtype: str,
) -> FusedMoE:
    """The expert block of GLM4-MoE: ``noaux_tc`` router, routed experts, shared experts as one gated MLP."""
    router = NoAuxTcRouter(
        hidden_size,
        moe.num_experts,
        top_k=moe.num_experts_per_tok,
        n_group=moe.n_group,
        topk_group=moe.topk_group,
        norm_topk_prob=moe.norm_topk_prob,
        routed_scaling_factor=moe.routed_scaling_factor,
        prefix=f"{prefix}.gate",
    )
    shared = None
    if moe.num_shared_experts:
        width = moe.intermediate_size * moe.num_shared_experts
        shared_prefix = f"{prefix}.shared_experts"
        shared = GatedMLP(hidden_size, width, tp=tp, prefix=shared_prefix, reduce_results=False, dtype=dtype)
    return FusedMoE(
        hidden_size,
        moe.intermediate_size,
        moe.num_experts,
        tp=tp,
        prefix=fusable(f"{prefix}.experts"),
        router=router,
        shared=shared,
        placement=placement,
        dtype=dtype,
    )
