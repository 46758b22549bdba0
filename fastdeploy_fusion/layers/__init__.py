"""Layers of a tensor-parallel decoder. They take plain values and ``tp``, an open ``AllReduceFusion``."""

from .attention import AttentionStep
from .context import ContextSplit
from .decoder import DecoderLayer, MixerLayer, complete
from .embedding import ParallelLMHead, VocabParallelEmbedding
from .grouped_attention import GroupedQueryAttention
from .kv_cache import KVCache, PackedBatch
from .latent_attention import LatentAttention, LatentSizes
from .linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from .mamba import MambaMixer, MambaSizes
from .mlp import GatedMLP, SquaredReluMLP
from .moe import ExpertPlacement, FusedMoE
from .norm import RMSNorm
from .paged_cache import PagedKVCache, PageTable
from .parameter import TensorSpec, WeightedLayer, empty_parameter
from .pipeline import PipelineStage
from .rotary import RotaryEmbedding
from .router import NoAuxTcRouter, SoftmaxRouter
from .shards import split_heads
from .state_cache import StateCache, StateStep
from .yarn import YarnScaling

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
    "LatentAttention",
    "LatentSizes",
    "MambaMixer",
    "MambaSizes",
    "MergedColumnParallelLinear",
    "MixerLayer",
    "NoAuxTcRouter",
    "PackedBatch",
    "PageTable",
    "PagedKVCache",
    "ParallelLMHead",
    "PipelineStage",
    "QKVParallelLinear",
    "RMSNorm",
    "ReplicatedLinear",
    "RotaryEmbedding",
    "RowParallelLinear",
    "SoftmaxRouter",
    "SquaredReluMLP",
    "StateCache",
    "StateStep",
    "TensorSpec",
    "VocabParallelEmbedding",
    "WeightedLayer",
    "YarnScaling",
    "complete",
    "empty_parameter",
    "split_heads",
]
