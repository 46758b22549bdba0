"""Layers of a tensor-parallel decoder. They take plain values and ``tp``, an open ``AllReduceFusion``."""

from .attention import AttentionStep
from .embedding import ParallelLMHead, VocabParallelEmbedding
from .kv_cache import KVCache, PackedBatch
from .linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from .mlp import GatedMLP
from .moe import ExpertPlacement, FusedMoE
from .norm import RMSNorm
from .parameter import TensorSpec, WeightedLayer, empty_parameter
from .rotary import RotaryEmbedding
from .router import NoAuxTcRouter

__all__ = [
    "AttentionStep",
    "ColumnParallelLinear",
    "ExpertPlacement",
    "FusedMoE",
    "GatedMLP",
    "KVCache",
    "MergedColumnParallelLinear",
    "NoAuxTcRouter",
    "PackedBatch",
    "ParallelLMHead",
    "QKVParallelLinear",
    "RMSNorm",
    "ReplicatedLinear",
    "RotaryEmbedding",
    "RowParallelLinear",
    "TensorSpec",
    "VocabParallelEmbedding",
    "WeightedLayer",
    "empty_parameter",
]
