"""Routers: which experts a token goes to, and with which weights."""

from typing import Any

import paddle
import paddle.nn.functional as F

from ..sites import parse_site
from . import ops
from .parameter import TensorSpec, WeightedLayer, empty_parameter


class NoAuxTcRouter(WeightedLayer):
    """The router of DeepSeek-V3 and GLM4-MoE (``noaux_tc``), in float32 throughout.

    Scores are sigmoids. The correction bias only selects: it is added for choosing groups (the ``topk_group`` of
    ``n_group`` groups with the largest sum of their two best) and experts (``top_k`` of those groups), while the
    weights are the unbiased scores, normalised if ``norm_topk_prob`` and multiplied by ``routed_scaling_factor``.
    The bias must not be rounded: next to scores that differ little, a bfloat16 one chooses other experts.
    """

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        *,
        top_k: int,
        n_group: int = 1,
        topk_group: int = 1,
        norm_topk_prob: bool = True,
        routed_scaling_factor: float = 1.0,
        prefix: str,
    ) -> None:
        super().__init__()
        _check_groups(num_experts, top_k, n_group, topk_group)
        self.num_experts, self.top_k, self.n_group, self.topk_group = num_experts, top_k, n_group, topk_group
        self.norm_topk_prob, self.routed_scaling_factor = norm_topk_prob, routed_scaling_factor
        self.prefix = parse_site(prefix).weight_prefix
        self.weight = empty_parameter([num_experts, hidden_size], "float32")
        self.e_score_correction_bias = empty_parameter([num_experts], "float32")

    def forward(self, x: Any) -> tuple[Any, Any]:
        """``x [num_tokens, hidden]`` -> float32 weights and int64 expert ids, both ``[num_tokens, top_k]``."""
        scores = F.sigmoid(ops.linear(ops.cast(x, paddle.float32), self.weight))
        choice = self._mask_groups(scores + self.e_score_correction_bias)
        expert_ids = paddle.topk(choice, self.top_k, axis=-1, sorted=False)[1]
        weights = paddle.take_along_axis(scores, expert_ids, axis=-1, broadcast=False)
        if self.norm_topk_prob:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        if self.routed_scaling_factor != 1.0:
            weights = weights * self.routed_scaling_factor
        return weights, expert_ids

    def own_tensors(self) -> list[TensorSpec]:
        params = {"weight": self.weight, "e_score_correction_bias": self.e_score_correction_bias}
        specs = []
        for name, param in params.items():
            whole = tuple(slice(0, size) for size in param.shape)
            specs.append(TensorSpec(f"{self.prefix}.{name}", tuple(param.shape), param, whole, whole))
        return specs

    def _mask_groups(self, choice: Any) -> Any:
        """Experts outside the chosen groups get -inf, so that even a negative biased score beats them."""
        if self.n_group == 1:
            return choice
        grouped = choice.reshape([choice.shape[0], self.n_group, -1])
        group_scores = paddle.topk(grouped, 2, axis=-1)[0].sum(-1)
        groups = paddle.topk(group_scores, self.topk_group, axis=-1, sorted=False)[1]
        chosen = F.one_hot(groups, self.n_group).sum(1).unsqueeze(-1) > 0
        return paddle.where(chosen, grouped, paddle.full_like(grouped, float("-inf"))).reshape(choice.shape)


class SoftmaxRouter(WeightedLayer):
    """The ``top_k`` largest of the softmax over all experts, made to sum to 1 if ``norm_topk_prob``; in float32."""

    def __init__(
        self, hidden_size: int, num_experts: int, *, top_k: int, norm_topk_prob: bool = True, prefix: str
    ) -> None:
        super().__init__()
        _check_groups(num_experts, top_k, 1, 1)
        self.top_k, self.norm_topk_prob = top_k, norm_topk_prob
        self.key = parse_site(prefix).weight_prefix + ".weight"
        self.weight = empty_parameter([num_experts, hidden_size], "float32")

    def forward(self, x: Any) -> tuple[Any, Any]:
        """``x [num_tokens, hidden]`` -> float32 weights and int64 expert ids, both ``[num_tokens, top_k]``."""
        probabilities = F.softmax(ops.linear(ops.cast(x, paddle.float32), self.weight))
        weights, expert_ids = paddle.topk(probabilities, self.top_k, axis=-1)
        return weights / weights.sum(-1, keepdim=True) if self.norm_topk_prob else weights, expert_ids

    def own_tensors(self) -> list[TensorSpec]:
        whole = tuple(slice(0, size) for size in self.weight.shape)
        return [TensorSpec(self.key, tuple(self.weight.shape), self.weight, whole, whole)]


def _check_groups(num_experts: int, top_k: int, n_group: int, topk_group: int) -> None:
    if n_group < 1 or num_experts < 1 or num_experts % n_group:
        raise ValueError(f"n_routed_experts {num_experts} is not a multiple of n_group {n_group}; correct the config")
    if not 1 <= topk_group <= n_group:
        raise ValueError(f"topk_group {topk_group} is outside 1..n_group {n_group}; correct the config")
    group_size = num_experts // n_group
    if n_group > 1 and group_size < 2:
        raise ValueError(
            f"n_group {n_group} leaves {group_size} expert a group, but a group is scored by its two best; "
            "use n_group 1 or more experts"
        )
    if not 1 <= top_k <= group_size * topk_group:
        raise ValueError(
            f"num_experts_per_tok {top_k} is outside 1..{group_size * topk_group}, the experts of topk_group "
            f"{topk_group} groups; correct the config"
        )
