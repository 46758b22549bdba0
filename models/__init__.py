"""Models built from ``fastdeploy_fusion.layers``, loaded from Hugging Face checkpoints."""

from .config import ModelConfig
from .generation import Result, generate, prompt_logits
from .registry import build, load_config, load_model, settle_fusion
from .sampling import SamplingParams

__all__ = [
    "ModelConfig",
    "Result",
    "SamplingParams",
    "build",
    "generate",
    "load_config",
    "load_model",
    "prompt_logits",
    "settle_fusion",
]
