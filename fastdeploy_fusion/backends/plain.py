"""The plain path, complete everywhere: Paddle's all-reduce, then the addition and the norm.

gloo and NCCL choose their algorithm, and so the order of addition, by size. In deterministic mode the ranks' shares are
gathered instead and added in rank order in float32, as ``shm`` does: on a CPU, to the same bits.

On a CPU all of it is computed in float32, because Paddle 3.3 has no 16-bit addition, multiplication or mean there.
"""

from collections.abc import Callable
from typing import Any

import paddle

from ..groups import RankGroup
from . import host_norm


class PlainBackend:
    """Reduces over ``group`` with Paddle's own collective. Needs no workspace."""

    name = "plain"
    takes_weight_bias = True

    def __init__(self, group: RankGroup, deterministic: bool = False) -> None:
        self._group = group
        self.timeout_s = group.timeout_s
        self.deterministic = deterministic
        self._sum = group.ordered_sum if deterministic else group.all_reduce

    def add_rms_norm(
        self,
        partial: Any,
        residual: Any | None,
        weight: Any,
        eps: float,
        weight_bias: float = 0.0,
        *,
        reduce: Callable[[Any], Any] | None = None,
    ) -> tuple[Any, Any]:
        """``residual`` may be None here: the sum itself is normalised. ``reduce``: what adds up in place of Paddle."""
        dtype = partial.dtype
        if reduce is None:
            total = self._sum(partial, unrounded=True)
        else:  # on a CPU in float32, or the sum would be rounded before its time
            total = reduce(partial.astype("float32") if partial.place.is_cpu_place() else partial)
        norm, residual_out = add_rms_norm(total, residual, weight, eps, weight_bias)
        if residual_out is partial:  # one rank, float32, no residual: the caller's own tensor
            residual_out = partial.clone()
        return norm.astype(dtype), residual_out.astype(dtype)

    def all_reduce(self, partial: Any) -> Any:
        return self._sum(partial)

    def close(self) -> None:
        """Nothing is held."""


def add_rms_norm(x: Any, residual: Any | None, weight: Any, eps: float, weight_bias: float = 0.0) -> tuple[Any, Any]:
    """``(norm_out, residual_out)`` in float32 of complete tensors: ``residual_out = x + residual``, then RMSNorm.

    Args:
        x: ``[..., hidden]`` of any float dtype; residual: same shape, or None; weight: ``[hidden]`` of any float dtype;
        weight_bias: added to the weight, in float32.
    """
    total = x.astype("float32")
    weight = weight.astype("float32")
    if weight_bias:
        weight = weight + weight_bias
    residual = None if residual is None else residual.astype("float32")
    if total.place.is_cpu_place():
        return host_norm.add_rms_norm(total, residual, weight, eps)
    if residual is not None:
        total = total + residual
    scale = paddle.rsqrt(paddle.mean(total * total, axis=-1, keepdim=True) + eps)
    return total * scale * weight, total
