"""Feed-forward blocks as a model's config describes them, shared by the models. Their one sum is marked fusable."""

from typing import TYPE_CHECKING

from fastdeploy_fusion.layers import ExpertPlacement, FusedMoE, GatedMLP, NoAuxTcRouter
from fastdeploy_fusion.sites import fusable

from .config import ModelConfig, MoeConfig

if TYPE_CHECKING:
    from fastdeploy_fusion.parallel import Parallel


def make_dense(config: ModelConfig, *, parallel: "Parallel", prefix: str, dtype: str) -> GatedMLP:
    """A gated MLP of the model's width."""
    return GatedMLP(
        config.hidden_size,
        config.intermediate_size,
        tp=parallel.tp,
        prefix=prefix,
        down_prefix=fusable(f"{prefix}.down_proj"),
        dtype=dtype,
    )


def make_moe(hidden_size: int, moe: MoeConfig, *, parallel: "Parallel", prefix: str, dtype: str) -> FusedMoE:
    """The expert block of GLM4-MoE and DeepSeek-V3: ``noaux_tc`` router, experts, shared experts as one gated MLP."""
    shared = None
    if moe.shared_size:
        shared = GatedMLP(
            hidden_size,
            moe.shared_size,
            tp=parallel.moe,
            prefix=f"{prefix}.shared_experts",
            reduce_results=False,
            dtype=dtype,
        )
    return FusedMoE(
        hidden_size,
        moe.intermediate_size,
        moe.num_experts,
        tp=parallel.moe,
        prefix=fusable(f"{prefix}.experts"),
        router=make_noaux_tc_router(hidden_size, moe, prefix),
        shared=shared,
        placement=place_experts(moe, parallel),
        dtype=dtype,
    )


def make_noaux_tc_router(hidden_size: int, moe: MoeConfig, prefix: str) -> NoAuxTcRouter:
    """The router of the block at ``prefix``."""
    return NoAuxTcRouter(
        hidden_size,
        moe.num_experts,
        top_k=moe.num_experts_per_tok,
        n_group=moe.n_group,
        topk_group=moe.topk_group,
        norm_topk_prob=moe.norm_topk_prob,
        routed_scaling_factor=moe.routed_scaling_factor,
        prefix=f"{prefix}.gate",
    )


def place_experts(moe: MoeConfig, parallel: "Parallel") -> ExpertPlacement:
    """Which experts this rank holds under the layout."""
    return ExpertPlacement.dealt(moe.num_experts, parallel.place, parallel.config)
