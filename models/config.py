"""What a checkpoint's ``config.json`` says about its model, in one frozen, checked shape."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastdeploy_fusion.errors import CheckpointError

FAMILY_DEFAULTS: dict[str, dict[str, Any]] = {
    # What transformers' config class assumes when the file leaves a key out.
    "Glm4MoeForCausalLM": {"partial_rotary_factor": 0.5},
}


@dataclass(frozen=True)
class MoeConfig:
    """Routed and shared experts. The first ``first_k_dense_replace`` layers have a dense MLP instead."""

    num_experts: int
    num_experts_per_tok: int
    intermediate_size: int
    num_shared_experts: int = 0
    first_k_dense_replace: int = 0
    n_group: int = 1
    topk_group: int = 1
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.0


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and switches of a decoder. ``eos_token_ids`` come from ``generation_config.json`` where it has them."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rotary_dim: int
    max_position_embeddings: int | None = None
    attention_bias: bool = False
    use_qk_norm: bool = False
    tie_word_embeddings: bool = False
    eos_token_ids: tuple[int, ...] = ()
    moe: MoeConfig | None = None

    @classmethod
    def from_hf(cls, values: dict[str, Any], generation: dict[str, Any] | None = None) -> "ModelConfig":
        """Read ``config.json``'s content. Rotary settings may be at top level or in ``rope_parameters``.

        A missing key, or a setting that the layers here don't have, is a ``CheckpointError`` naming it.
        """
        values = FAMILY_DEFAULTS.get(architecture_of(values), {}) | values
        _refuse_unsupported(values)
        rope = _rope(values)
        heads = _positive(values, "num_attention_heads")
        hidden_size = _positive(values, "hidden_size")
        head_dim = int(values.get("head_dim") or hidden_size // heads)
        return cls(
            architecture=architecture_of(values),
            vocab_size=_positive(values, "vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=_positive(values, "intermediate_size"),
            num_hidden_layers=_positive(values, "num_hidden_layers"),
            num_attention_heads=heads,
            num_key_value_heads=int(values.get("num_key_value_heads") or heads),
            head_dim=head_dim,
            rms_norm_eps=float(_required(values, "rms_norm_eps")),
            rope_theta=float(_required(rope, "rope_theta")),
            rotary_dim=int(head_dim * float(rope.get("partial_rotary_factor") or 1.0)),
            max_position_embeddings=values.get("max_position_embeddings"),
            attention_bias=bool(values.get("attention_bias", False)),
            use_qk_norm=bool(values.get("use_qk_norm", False)),
            tie_word_embeddings=bool(values.get("tie_word_embeddings", False)),
            eos_token_ids=_eos(generation or {}) or _eos(values),
            moe=_moe(values),
        )


def architecture_of(values: dict[str, Any]) -> str:
    names = values.get("architectures") or []
    if len(names) != 1:
        raise CheckpointError(f"config.json has architectures {names!r}; it must name exactly one")
    return str(names[0])


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file of the checkpoint; CheckpointError names the file when that fails."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"can't read {path}: {error.strerror}; give the folder of a checkpoint") from error
    except ValueError as error:
        raise CheckpointError(f"{path} is not valid JSON ({error}); download or copy it again") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{path} holds {type(values).__name__}, not a JSON object; download or copy it again")
    return values


def _required(values: dict[str, Any], key: str) -> Any:
    if values.get(key) is None:
        raise CheckpointError(f"config.json has no {key!r}, which the model needs; take it from the model's source")
    return values[key]


def _positive(values: dict[str, Any], key: str) -> int:
    value = _required(values, key)
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise CheckpointError(f"config.json has {key} = {value!r}; it must be a positive integer")
    return value


def _rope(values: dict[str, Any]) -> dict[str, Any]:
    """Rotary settings: ``rope_parameters`` first, then the top level, where older files keep them."""
    nested = values.get("rope_parameters") or {}
    scaling = values.get("rope_scaling") or {}
    for source, name in ((nested, "rope_parameters"), (scaling, "rope_scaling")):
        kind = source.get("rope_type", source.get("type", "default"))
        if kind != "default":
            raise CheckpointError(f"{name} of config.json has rope type {kind!r}; only 'default' is implemented")
    top = {key: values[key] for key in ("rope_theta", "partial_rotary_factor") if values.get(key) is not None}
    return top | {key: value for key, value in nested.items() if value is not None}


def _moe(values: dict[str, Any]) -> MoeConfig | None:
    if values.get("n_routed_experts") is None:
        return None
    return MoeConfig(
        num_experts=_positive(values, "n_routed_experts"),
        num_experts_per_tok=_positive(values, "num_experts_per_tok"),
        intermediate_size=_positive(values, "moe_intermediate_size"),
        num_shared_experts=int(values.get("n_shared_experts") or 0),
        first_k_dense_replace=int(values.get("first_k_dense_replace") or 0),
        n_group=int(values.get("n_group") or 1),
        topk_group=int(values.get("topk_group") or 1),
        norm_topk_prob=bool(values.get("norm_topk_prob", True)),
        routed_scaling_factor=float(values.get("routed_scaling_factor") or 1.0),
    )


def _eos(values: dict[str, Any]) -> tuple[int, ...]:
    eos = values.get("eos_token_id")
    if eos is None:
        return ()
    return tuple(eos) if isinstance(eos, list) else (int(eos),)


def _refuse_unsupported(values: dict[str, Any]) -> None:
    if values.get("hidden_act", "silu") != "silu":
        raise CheckpointError(f"config.json has hidden_act {values['hidden_act']!r}; only 'silu' is implemented")
    if values.get("quantization_config"):
        raise CheckpointError("config.json has a quantization_config; give the unquantised (bf16) checkpoint")
