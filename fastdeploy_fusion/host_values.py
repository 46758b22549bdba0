"""Values between numpy and Paddle, converted on the host: no kernel is launched, which some runtimes lack for 16 bits.

Paddle hands bfloat16 to numpy, and takes it from there, as its bits in ``uint16``.
"""

from typing import Any

import ml_dtypes
import numpy as np
import paddle

from .config import DTYPES

DTYPE_NAMES = {getattr(paddle, name): name for name in DTYPES}
"""Paddle's dtype -> its name in a config."""


def to_bits(values: np.ndarray, dtype: str) -> np.ndarray:
    """The contiguous array that Paddle reads as ``dtype``, rounded to nearest even; NaN stays NaN."""
    if dtype == "bfloat16":
        with np.errstate(invalid="ignore"):  # a signalling NaN becomes a quiet one
            return np.ascontiguousarray(values, np.float32).astype(ml_dtypes.bfloat16).view(np.uint16)
    return np.ascontiguousarray(values, dtype)


def from_bits(array: np.ndarray) -> np.ndarray:
    """float32 values of what a tensor's ``numpy()`` gave. Exact for 16 and 32 bits."""
    if array.dtype == np.uint16:
        return (array.astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float32)


def from_numpy(values: np.ndarray, dtype: str) -> Any:
    """A tensor of ``dtype`` on Paddle's current device."""
    return paddle.to_tensor(to_bits(values, dtype), dtype=dtype)


def to_float64(tensor: Any) -> np.ndarray:
    """The values of a tensor of float32 or 16 bits, for sums to be judged by."""
    return from_bits(tensor.numpy()).astype(np.float64)
