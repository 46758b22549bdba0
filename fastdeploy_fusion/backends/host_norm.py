"""Residual addition and RMSNorm of float32 CPU tensors, in numpy over their own memory.

Paddle 3.3 has one fused kernel for this, which ends the process with an illegal instruction on processors without
AVX-512; out of separate Paddle operations it takes four times as long for one token.
"""

import math
from typing import Any

import numpy as np

from .host_memory import HostViews, outputs

_views = HostViews()


def add_rms_norm(x: Any, residual: Any | None, weight: Any, eps: float) -> tuple[Any, Any]:
    """``residual_out = x + residual`` (``x`` itself without one) and its norm times ``weight``, as new tensors.

    Args:
        x, residual: float32 on the CPU, ``[..., hidden]``; weight: float32, ``[hidden]``.
    """
    shape = x.shape
    hidden_size = shape[-1]
    num_rows = math.prod(shape[:-1])  # not x.size, which Paddle computes in 10 us
    if num_rows == 0:
        return x.clone(), x
    x, weight = x.contiguous(), weight.contiguous()
    norm_out = outputs.empty(num_rows, hidden_size)
    norms, sums = _views.of(norm_out, num_rows, hidden_size), _views.of(x, num_rows, hidden_size)
    residual_out = x
    if residual is not None:
        residual = residual.contiguous()
        residual_out = outputs.empty(num_rows, hidden_size)
        total = _views.of(residual_out, num_rows, hidden_size)
        np.add(sums, _views.of(residual, num_rows, hidden_size), out=total)
        sums = total
    normalise_rows(sums, _views.of(weight, 1, hidden_size), eps, norms)
    if len(shape) != 2:
        norm_out, residual_out = norm_out.reshape(shape), residual_out.reshape(shape)
    return norm_out, residual_out


def normalise_rows(rows: np.ndarray, weight: np.ndarray, eps: float, out: np.ndarray) -> None:
    """``out = rows / rms(rows) * weight``; a row's bits do not depend on how many rows come with it."""
    hidden_size = rows.shape[1]
    if len(rows) == 1:
        # The same operations on scalars: small arrays cost a microsecond each.
        row = rows[0]
        mean = float(row.dot(row)) / hidden_size + eps
        scale = 1.0 / math.sqrt(mean) if mean > 0 else math.inf if mean == 0 else math.nan
        np.multiply(row, scale, out=out[0])
    else:
        scales = _square_sums(rows).astype(np.float64)
        scales /= hidden_size
        scales += eps
        np.sqrt(scales, out=scales)
        np.divide(1.0, scales, out=scales)
        np.multiply(rows, scales.astype(np.float32)[:, None], out=out)
    np.multiply(out, weight, out=out)


def _square_sums(rows: np.ndarray) -> np.ndarray:
    if hasattr(np, "vecdot"):  # numpy 2; BLAS's dot a row, as in the case of one row
        return np.vecdot(rows, rows)
    return np.array([row.dot(row) for row in rows], np.float32)
