"""The definition that every backend is judged by: sum, add, normalise, all in float32, rounded once at the end.

Rounding rule: the sum over ranks, the residual addition and the norm are computed in float32; ``residual_out`` and
``norm_out`` are each rounded once to the activation's dtype. The norm reads the unrounded sum.
"""

from typing import Any

import numpy as np


def add_rms_norm(
    partials: list[np.ndarray], residual: np.ndarray | None, weight: np.ndarray, eps: float, weight_bias: float = 0.0
) -> tuple[np.ndarray, np.ndarray]:
    """``(norm_out, residual_out)`` in float64 for operands ``[num_tokens, hidden]`` and a weight ``[hidden]``.

    ``residual_out = sum(partials) + residual`` and ``norm_out = residual_out / rms(residual_out) * weight`` (RMSNorm:
    Zhang and Sennrich, 2019), with ``rms(x) = sqrt(mean(x ** 2) + eps)`` over the last axis. ``weight_bias`` is added
    to the weight (1 in Gemma, whose checkpoints hold ``weight - 1``).
    """
    total: Any = sum(partial.astype(np.float64) for partial in partials)
    if residual is not None:
        total = total + residual.astype(np.float64)
    rms = np.sqrt(np.mean(total * total, axis=-1, keepdims=True) + eps)
    return total / rms * (weight.astype(np.float64) + weight_bias), total
