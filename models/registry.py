"""From an architecture's name to its model, and from a folder to a loaded model."""

import difflib
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastdeploy_fusion.errors import CheckpointError

from .config import ModelConfig, architecture_of, read_json

if TYPE_CHECKING:
    from fastdeploy_fusion.fusion import AllReduceFusion

ARCHITECTURES = {
    "Glm4MoeForCausalLM": (".glm4_moe", "Glm4MoeForCausalLM"),
}
"""Name in ``config.json`` -> module and class here."""


def load_config(model_dir: str | Path) -> ModelConfig:
    """Read ``config.json`` and, where present, ``generation_config.json``; an unknown architecture is refused first."""
    model_dir = Path(model_dir)
    values = read_json(model_dir / "config.json")
    check_architecture(architecture_of(values))
    generation_file = model_dir / "generation_config.json"
    return ModelConfig.from_hf(values, read_json(generation_file) if generation_file.exists() else None)


def check_architecture(name: str) -> None:
    """CheckpointError for an unknown architecture, with the known ones and the nearest."""
    if name in ARCHITECTURES:
        return
    near = difflib.get_close_matches(name, ARCHITECTURES, n=1, cutoff=0.0)
    raise CheckpointError(
        f"architecture {name!r} is not implemented; known: {', '.join(sorted(ARCHITECTURES))}; nearest: {near[0]}"
    )


def build(config: ModelConfig, tp: "AllReduceFusion", dtype: str = "float32") -> Any:
    """The model with unset weights on this rank. Sizes are checked here: ValueError says which does not split."""
    check_architecture(config.architecture)
    module, name = ARCHITECTURES[config.architecture]
    return getattr(import_module(module, __package__), name)(config, tp, dtype)


def load_model(model_dir: str | Path, tp: "AllReduceFusion", dtype: str = "float32", progress: bool = True) -> Any:
    """Build the model of a checkpoint and read this rank's shard of its weights. Collective over ``tp``'s group.

    ``dtype`` is that of weights and activations. ``model.load_summary`` tells what was read and skipped. Whatever is
    wrong with the checkpoint is one CheckpointError, raised on every rank.
    """
    from fastdeploy_fusion.weights import load_weights

    config = load_config(model_dir)
    model = build(config, tp, dtype)
    model.load_summary = load_weights(
        model.checkpoint_tensors(),
        model_dir,
        group=tp.group,
        num_hidden_layers=config.num_hidden_layers,
        tied_head=model.tied_head_key,
        progress=progress,
    )
    return model
