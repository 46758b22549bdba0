"""What a checkpoint's ``config.json`` says about its model, in one frozen, checked shape."""

from dataclasses import dataclass
from typing import Any

from fastdeploy_fusion.errors import CheckpointError
from fastdeploy_fusion.layers import LatentSizes, MambaSizes, YarnScaling

from .hf_json import architecture_of, eos_ids, is_whole, number, positive, real, rope_settings, whole

FAMILY_DEFAULTS: dict[str, dict[str, Any]] = {
    # What transformers' config class assumes when the file leaves a key out.
    "Glm4MoeForCausalLM": {"partial_rotary_factor": 0.5},
    "DeepseekV3ForCausalLM": {"rope_interleave": True},
    # Not in the file: the family always normalises queries and keys.
    "Qwen3MoeForCausalLM": {"norm_topk_prob": False, "use_qk_norm": True},
    "NemotronHForCausalLM": {"hidden_act": "silu"},
}

MIXERS = {
    # In ``hybrid_override_pattern``, and in both generations of ``layers_block_type``.
    "mamba": ("M", "mamba", "linear_attention"),
    "attention": ("*", "attention", "full_attention"),
    "mlp": ("-", "mlp"),
    "moe": ("E", "moe"),
}


@dataclass(frozen=True)
class MoeConfig:
    """Routed and shared experts. A layer has them if it is not among the first ``first_k_dense_replace``, not in
    ``mlp_only_layers``, and every ``sparse_step``-th; else it has a dense MLP. ``shared_size``: width of all shared
    experts together. ``latent_size``: the routed experts' own hidden size.
    """

    num_experts: int
    num_experts_per_tok: int
    intermediate_size: int
    shared_size: int = 0
    first_k_dense_replace: int = 0
    mlp_only_layers: tuple[int, ...] = ()
    sparse_step: int = 1
    n_group: int = 1
    topk_group: int = 1
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.0
    latent_size: int | None = None

    def in_layer(self, layer_id: int) -> bool:
        if layer_id < self.first_k_dense_replace or layer_id in self.mlp_only_layers:
            return False
        return (layer_id + 1) % self.sparse_step == 0


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and switches of a decoder. ``eos_token_ids`` come from ``generation_config.json`` where it has them.

    ``mixers``: of a hybrid decoder, "mamba", "attention", "mlp" or "moe" for each layer; empty elsewhere.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float = 0.0
    rotary_dim: int = 0
    rope_interleaved: bool = False
    yarn: YarnScaling | None = None
    max_position_embeddings: int | None = None
    attention_bias: bool = False
    mlp_bias: bool = False
    use_qk_norm: bool = False
    tie_word_embeddings: bool = False
    eos_token_ids: tuple[int, ...] = ()
    moe: MoeConfig | None = None
    latent: LatentSizes | None = None
    mixers: tuple[str, ...] = ()
    mamba: MambaSizes | None = None

    @classmethod
    def from_hf(cls, values: dict[str, Any], generation: dict[str, Any] | None = None) -> "ModelConfig":
        """Read ``config.json``'s content. Rotary settings may be at top level or in ``rope_parameters``.

        A missing key, or a setting that the layers here don't have, is a ``CheckpointError`` naming it.
        """
        values = FAMILY_DEFAULTS.get(architecture_of(values), {}) | values
        _refuse_unsupported(values)
        mixers = _mixers(values)
        heads = positive(values, "num_attention_heads")
        hidden_size = positive(values, "hidden_size")
        head_dim = whole(values, "head_dim") or whole(values, "attention_head_dim") or hidden_size // heads
        latent = _latent(values)
        eps_key = "layer_norm_epsilon" if mixers else "rms_norm_eps"
        if real(values, eps_key) < 0:
            raise CheckpointError(f"config.json has {eps_key} = {values[eps_key]!r}; it must be at least 0")
        return cls(
            architecture=architecture_of(values),
            vocab_size=positive(values, "vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=positive(values, "intermediate_size"),
            num_hidden_layers=len(mixers) or positive(values, "num_hidden_layers"),
            num_attention_heads=heads,
            num_key_value_heads=whole(values, "num_key_value_heads") or heads,
            head_dim=head_dim,
            rms_norm_eps=real(values, eps_key),
            max_position_embeddings=whole(values, "max_position_embeddings") or None,
            attention_bias=bool(values.get("attention_bias", False)),
            mlp_bias=bool(values.get("mlp_bias", False)),
            use_qk_norm=bool(values.get("use_qk_norm", False)),
            tie_word_embeddings=bool(values.get("tie_word_embeddings", False)),
            eos_token_ids=eos_ids(generation or {}) or eos_ids(values),
            moe=_moe(values),
            latent=latent,
            mixers=mixers,
            mamba=_mamba(values) if "mamba" in mixers else None,
            **({} if mixers else _rotary(values, head_dim if latent is None else latent.qk_rope_head_dim)),
        )


def _rotary(values: dict[str, Any], head_dim: int) -> dict[str, Any]:
    rope, yarn = rope_settings(values)
    share = real(rope, "partial_rotary_factor", 1.0)
    if not 0 < share <= 1:
        raise CheckpointError(f"config.json has partial_rotary_factor = {share}; it must be above 0 and at most 1")
    return {
        "rope_theta": real(rope, "rope_theta"),
        "rotary_dim": int(head_dim * share),
        "rope_interleaved": bool(values.get("rope_interleave", False)),
        "yarn": yarn,
    }


def _moe(values: dict[str, Any]) -> MoeConfig | None:
    keys = ("n_routed_experts", "num_experts", "num_local_experts")
    if all(values.get(key) is None for key in keys):
        return None
    intermediate_size = positive(values, "moe_intermediate_size")
    shared = whole(values, "n_shared_experts")
    shared_size = whole(values, "moe_shared_expert_intermediate_size") or shared * intermediate_size
    return MoeConfig(
        num_experts=positive(values, *keys),
        num_experts_per_tok=positive(values, "num_experts_per_tok"),
        intermediate_size=intermediate_size,
        shared_size=shared_size if shared else 0,
        first_k_dense_replace=whole(values, "first_k_dense_replace"),
        mlp_only_layers=tuple(_layer_numbers(values, "mlp_only_layers")),
        sparse_step=whole(values, "decoder_sparse_step") or 1,
        n_group=whole(values, "n_group") or 1,
        topk_group=whole(values, "topk_group") or 1,
        norm_topk_prob=bool(values.get("norm_topk_prob", True)),
        routed_scaling_factor=real(values, "routed_scaling_factor", 1.0),
        latent_size=whole(values, "moe_latent_size") or None,
    )


def _layer_numbers(values: dict[str, Any], key: str) -> list[int]:
    listed = values.get(key) or []
    if not isinstance(listed, list) or not all(map(is_whole, listed)):
        raise CheckpointError(f"config.json has {key} = {listed!r}; it must be a list of layer numbers")
    return listed


def _latent(values: dict[str, Any]) -> LatentSizes | None:
    if values.get("kv_lora_rank") is None:
        return None
    return LatentSizes(
        q_lora_rank=None if values.get("q_lora_rank") is None else positive(values, "q_lora_rank"),
        kv_lora_rank=positive(values, "kv_lora_rank"),
        qk_nope_head_dim=positive(values, "qk_nope_head_dim"),
        qk_rope_head_dim=positive(values, "qk_rope_head_dim"),
        v_head_dim=positive(values, "v_head_dim"),
    )


def _mixers(values: dict[str, Any]) -> tuple[str, ...]:
    """Of a hybrid decoder: ``layers_block_type``, a list of words, or ``hybrid_override_pattern``, a letter a layer."""
    listed = values.get("layers_block_type") or list(values.get("hybrid_override_pattern") or "")
    if not listed:
        return ()
    names = {word: mixer for mixer, words in MIXERS.items() for word in words}
    unknown = sorted({str(word) for word in listed if word not in names})
    if unknown:
        raise CheckpointError(f"config.json has mixers {', '.join(unknown)}; known are {', '.join(names)}")
    if values.get("num_hidden_layers") not in (None, len(listed)):
        raise CheckpointError(
            f"config.json lists {len(listed)} mixers and has num_hidden_layers {values['num_hidden_layers']}; "
            "make them equal"
        )
    return tuple(names[word] for word in listed)


def _mamba(values: dict[str, Any]) -> MambaSizes:
    """The second names are those of configs written for the first release."""
    low, high = values.get("time_step_limit") or values.get("mamba_dt_limit") or (0.0, float("inf"))
    return MambaSizes(
        num_heads=positive(values, "mamba_num_heads"),
        head_dim=positive(values, "mamba_head_dim"),
        n_groups=positive(values, "n_groups", "mamba_n_groups"),
        state_size=positive(values, "ssm_state_size"),
        conv_kernel=positive(values, "conv_kernel", "mamba_d_conv"),
        chunk_size=positive(values, "chunk_size", "mamba_chunk_size"),
        with_bias=bool(values.get("use_bias", False)),
        with_conv_bias=bool(values.get("use_conv_bias", values.get("mamba_conv_bias", True))),
        dt_limit=(number(low), number(high)),
    )


def _refuse_unsupported(values: dict[str, Any]) -> None:
    known = {"hidden_act": "silu", "mlp_hidden_act": "relu2", "mamba_hidden_act": "silu", "use_sliding_window": False}
    for key, only in known.items():
        if values.get(key, only) != only:
            raise CheckpointError(f"config.json has {key} {values[key]!r}; only {only!r} is implemented")
    if values.get("mlp_bias") and architecture_of(values) != "NemotronHForCausalLM":
        raise CheckpointError("config.json has mlp_bias true; the dense blocks of this family have none here")
    if values.get("quantization_config"):
        raise CheckpointError("config.json has a quantization_config; give the unquantised (bf16) checkpoint")
