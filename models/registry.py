"""From an architecture's name to its model, and from a folder to a loaded model."""

import difflib
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastdeploy_fusion.config import FusionConfig, ParallelConfig
from fastdeploy_fusion.errors import CheckpointError

from .config import ModelConfig
from .hf_json import architecture_of, read_json

if TYPE_CHECKING:
    from fastdeploy_fusion.fusion import AllReduceFusion
    from fastdeploy_fusion.parallel import Parallel

ARCHITECTURES = {
    "DeepseekV3ForCausalLM": (".deepseek_v3", "DeepseekV3ForCausalLM"),
    "Glm4MoeForCausalLM": (".glm4_moe", "Glm4MoeForCausalLM"),
    "NemotronHForCausalLM": (".nemotron_h", "NemotronHForCausalLM"),
    "Qwen3MoeForCausalLM": (".qwen3_moe", "Qwen3MoeForCausalLM"),
}
"""Name in ``config.json`` -> module and class here."""


def load_config(model_dir: str | Path) -> ModelConfig:
    """Read ``config.json`` and, where present, ``generation_config.json``; an unknown architecture is refused first."""
    model_dir = Path(model_dir)
    values = read_json(model_dir / "config.json")
    check_architecture(architecture_of(values))
    generation_file = model_dir / "generation_config.json"
    return ModelConfig.from_hf(values, read_json(generation_file) if generation_file.exists() else None)


def settle_fusion(fusion: FusionConfig, config: ModelConfig, layout: ParallelConfig) -> FusionConfig:
    """The fusion settings with ``auto`` decided for this model: every one that is served here is marked for fusion."""
    return fusion.settle(config.architecture, ARCHITECTURES, layout.tensor_parallel_size)


def check_architecture(name: str) -> None:
    """CheckpointError for an unknown architecture, with the known ones and the nearest."""
    if name in ARCHITECTURES:
        return
    near = difflib.get_close_matches(name, ARCHITECTURES, n=1, cutoff=0.0)
    raise CheckpointError(
        f"architecture {name!r} is not implemented; known: {', '.join(sorted(ARCHITECTURES))}; nearest: {near[0]}"
    )


def build(config: ModelConfig, ranks: "Parallel | AllReduceFusion", dtype: str = "float32") -> Any:
    """The model with unset weights on this rank; ``ranks`` is a layout, or an open fusion for tensor parallelism alone.

    Sizes are checked here: ValueError says which does not split, or which axis the model does not run under.
    A model class with ``takes_layout`` gets the ``Parallel``; others get its ``tp``.
    """
    from fastdeploy_fusion.parallel import as_parallel

    check_architecture(config.architecture)
    module, name = ARCHITECTURES[config.architecture]
    parallel, model_class = as_parallel(ranks), getattr(import_module(module, __package__), name)
    takes_layout = getattr(model_class, "takes_layout", False)
    _refuse_layout(config.architecture, parallel.config, takes_layout)
    model = model_class(config, parallel if takes_layout else parallel.tp, dtype)
    model.parallel = parallel
    return model


def _refuse_layout(architecture: str, layout: ParallelConfig, takes_layout: bool) -> None:
    names = ["expert_parallel_size", "context_parallel_size", "pipeline_parallel_size"]
    sizes = {name: getattr(layout, name) for name in names}
    beyond = [f"{name} {size}" for name, size in sizes.items() if size > 1]
    if beyond and not takes_layout:
        raise ValueError(f"{architecture} runs tensor- and data-parallel, not with {', '.join(beyond)}; set it to 1")
    if layout.enable_dp_attention and layout.tensor_parallel_size > 1:
        raise ValueError(f"{architecture} does not run with data-parallel attention; use data_parallel_size instead")


def load_model(
    model_dir: str | Path, ranks: "Parallel | AllReduceFusion", dtype: str = "float32", progress: bool = True
) -> Any:
    """Build the model of a checkpoint and read this rank's part of its weights. Collective over the replica's ranks.

    ``ranks``: a layout, or an open fusion for tensor parallelism alone. ``dtype`` is that of weights and activations.
    ``model.load_summary`` tells what was read and skipped. Whatever is wrong with the checkpoint is one
    CheckpointError, raised on every rank.
    """
    from fastdeploy_fusion.weights import load_weights, with_other_stages

    config = load_config(model_dir)
    model = build(config, ranks, dtype)
    parallel = model.parallel
    model.load_summary = load_weights(
        with_other_stages(model.checkpoint_tensors(), parallel.pipeline),
        model_dir,
        group=parallel.replica,
        num_hidden_layers=config.num_hidden_layers,
        tied_head=model.tied_head_key,
        progress=progress and parallel.place.data == 0,
    )
    return model
