"""Reading the JSON files of a Hugging Face checkpoint; whatever is wrong in them is a CheckpointError naming it."""

import json
from pathlib import Path
from typing import Any

from fastdeploy_fusion.errors import CheckpointError
from fastdeploy_fusion.layers import YarnScaling


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


def architecture_of(values: dict[str, Any]) -> str:
    names = values.get("architectures") or []
    if len(names) != 1:
        raise CheckpointError(f"config.json has architectures {names!r}; it must name exactly one")
    return str(names[0])


def required(values: dict[str, Any], key: str) -> Any:
    if values.get(key) is None:
        raise CheckpointError(f"config.json has no {key!r}, which the model needs; take it from the model's source")
    return values[key]


def positive(values: dict[str, Any], *keys: str) -> int:
    """The first of ``keys`` that is there: files of one family name some settings differently."""
    key = next((key for key in keys if values.get(key) is not None), keys[0])
    value = required(values, key)
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise CheckpointError(f"config.json has {key} = {value!r}; it must be a positive integer")
    return value


def number(value: Any) -> float:
    """A number; infinity may be written as ``Infinity``, as a text, or as ``{"__float__": "Infinity"}``."""
    return float(value["__float__"] if isinstance(value, dict) and "__float__" in value else value)


def rope_settings(values: dict[str, Any]) -> tuple[dict[str, Any], YarnScaling | None]:
    """Rotary settings: ``rope_parameters`` first, then the top level, where older files keep them."""
    nested, scaling = values.get("rope_parameters") or {}, values.get("rope_scaling") or {}
    yarn = None
    for source, name in ((scaling, "rope_scaling"), (nested, "rope_parameters")):
        kind = source.get("rope_type", source.get("type", "default"))
        if kind == "yarn":
            yarn = _yarn(source, values)
        elif kind != "default":
            raise CheckpointError(f"{name} of config.json has rope type {kind!r}; known are 'default' and 'yarn'")
    top = {key: values[key] for key in ("rope_theta", "partial_rotary_factor") if values.get(key) is not None}
    return top | {key: value for key, value in nested.items() if value is not None}, yarn


def _yarn(source: dict[str, Any], values: dict[str, Any]) -> YarnScaling:
    original = positive(source, "original_max_position_embeddings")
    factor = source.get("factor") or positive(values, "max_position_embeddings") / original
    attention_factor = source.get("attention_factor")
    return YarnScaling(
        factor=float(factor),
        original_max_positions=original,
        beta_fast=float(source.get("beta_fast") or 32.0),
        beta_slow=float(source.get("beta_slow") or 1.0),
        mscale=float(source.get("mscale") or 0.0),
        mscale_all_dim=float(source.get("mscale_all_dim") or 0.0),
        attention_factor=None if attention_factor is None else float(attention_factor),
        truncate=bool(source.get("truncate", True)),
    )


def eos_ids(values: dict[str, Any]) -> tuple[int, ...]:
    eos = values.get("eos_token_id")
    if eos is None:
        return ()
    return tuple(eos) if isinstance(eos, list) else (int(eos),)
