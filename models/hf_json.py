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


def is_whole(value: Any) -> bool:
    """A whole number; JSON's true and false are none, though Python's are."""
    return isinstance(value, int) and not isinstance(value, bool)


def positive(values: dict[str, Any], *keys: str) -> int:
    """The first of ``keys`` that is there: files of one family name some settings differently."""
    key = next((key for key in keys if values.get(key) is not None), keys[0])
    value = required(values, key)
    if not is_whole(value) or value <= 0:
        raise CheckpointError(f"config.json has {key} = {value!r}; it must be a positive integer")
    return value


def whole(values: dict[str, Any], key: str, default: int = 0) -> int:
    """A whole number that the file may leave out or have as null, of at least 0."""
    value = values.get(key)
    if value is None:
        return default
    if not is_whole(value) or value < 0:
        raise CheckpointError(f"config.json has {key} = {value!r}; it must be a whole number of at least 0")
    return value


def real(values: dict[str, Any], key: str, default: float | None = None) -> float:
    """A number; where the file leaves it out or has null, ``default``, or an error if there is none."""
    value = values.get(key)
    value = default if value is None else value
    if value is None:
        required(values, key)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise CheckpointError(f"config.json has {key} = {value!r}; it must be a number")
    return float(value)


def section(values: dict[str, Any], key: str) -> dict[str, Any]:
    """A JSON object that the file may leave out or have as null."""
    value = values.get(key) or {}
    if not isinstance(value, dict):
        raise CheckpointError(f"config.json has {key} = {value!r}; it must be an object")
    return value


def number(value: Any) -> float:
    """A number; infinity may be written as ``Infinity``, as a text, or as ``{"__float__": "Infinity"}``."""
    return float(value["__float__"] if isinstance(value, dict) and "__float__" in value else value)


def rope_settings(values: dict[str, Any]) -> tuple[dict[str, Any], YarnScaling | None]:
    """Rotary settings: ``rope_parameters`` first, then the top level, where older files keep them."""
    nested, scaling = section(values, "rope_parameters"), section(values, "rope_scaling")
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
    factor = real(source, "factor", 0.0) or positive(values, "max_position_embeddings") / original
    return YarnScaling(
        factor=factor,
        original_max_positions=original,
        beta_fast=real(source, "beta_fast", 32.0),
        beta_slow=real(source, "beta_slow", 1.0),
        mscale=real(source, "mscale", 0.0),
        mscale_all_dim=real(source, "mscale_all_dim", 0.0),
        attention_factor=None if source.get("attention_factor") is None else real(source, "attention_factor"),
        truncate=bool(source.get("truncate", True)),
    )


def eos_ids(values: dict[str, Any]) -> tuple[int, ...]:
    """``eos_token_id``: none, one or a list."""
    eos = values.get("eos_token_id")
    ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
    if not all(map(is_whole, ids)):
        raise CheckpointError(f"the checkpoint has eos_token_id = {eos!r}; it must be a token id, or a list of them")
    return tuple(ids)
