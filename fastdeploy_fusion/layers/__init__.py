"""Layers of a tensor-parallel decoder. They take plain values and ``tp``, an open ``AllReduceFusion``."""

from .attention import AttentionStep
from .context import ContextSplit
from .decoder import DecoderLayer, MixerLayer, complete
from .embedding import ParallelLMHead, VocabParallelEmbedding
from .grouped_attention import GroupedQueryAttention
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
from .pipeline import PipelineStage
from .rotary import RotaryEmbedding
from .router import NoAuxTcRouter

__all__ = [
    "AttentionStep",
    "ColumnParallelLinear",
    "ContextSplit",
    "DecoderLayer",
    "ExpertPlacement",
    "FusedMoE",
    "GatedMLP",
    "GroupedQueryAttention",
    "KVCache",
    "MergedColumnParallelLinear",
    "MixerLayer",
    "NoAuxTcRouter",
    "PackedBatch",
    "ParallelLMHead",
    "PipelineStage",
    "QKVParallelLinear",
    "RMSNorm",
    "ReplicatedLinear",
    "RotaryEmbedding",
    "RowParallelLinear",
    "TensorSpec",
    "VocabParallelEmbedding",
    "WeightedLayer",
    "complete",
    "empty_parameter",
]
