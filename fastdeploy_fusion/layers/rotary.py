"""Rotary position embedding."""

from typing import Any

import numpy as np
import paddle

from . import ops


class RotaryEmbedding:
    """Rotates the first ``rotary_dim`` of each head, halves paired (``x[i]`` with ``x[i + rotary_dim / 2]``)."""

    def __init__(self, rotary_dim: int, theta: float) -> None:
        if rotary_dim <= 0 or rotary_dim % 2:
            raise ValueError(f"rotary_dim is {rotary_dim}; it must be even and positive: correct partial_rotary_factor")
        if theta <= 0:
            raise ValueError(f"rope_theta is {theta}; it must be positive")
        self.rotary_dim = rotary_dim
        exponents = np.arange(0, rotary_dim, 2, dtype=np.float32) / np.float32(rotary_dim)
        self.frequencies = (1.0 / np.power(np.float32(theta), exponents)).astype(np.float32)

    def angles(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Cosines and sines, float32 ``[num_tokens, 1, rotary_dim / 2]``."""
        angles = positions.astype(np.float32)[:, None, None] * self.frequencies
        return np.cos(angles), np.sin(angles)

    def rotate(self, x: Any, cos: Any, sin: Any) -> Any:
        """``x [num_tokens, heads, head_dim]``, rotated in float32; same shape and dtype, a new tensor.

        ``cos`` and ``sin`` as of ``angles``: arrays for a CPU tensor, else tensors.
        """
        wide = ops.cast(x, paddle.float32)
        if isinstance(cos, np.ndarray):
            out = ops.host_empty(wide.shape)
            self._rotate_host(ops.host_array(wide), cos, sin, ops.host_array(out))
            return ops.cast(out, x.dtype)
        half, dim = self.rotary_dim // 2, self.rotary_dim
        first, second = wide[:, :, :half], wide[:, :, half:dim]
        parts = [first * cos - second * sin, second * cos + first * sin, wide[:, :, dim:]]
        return ops.cast(paddle.concat(parts if dim < x.shape[-1] else parts[:2], axis=-1), x.dtype)

    def _rotate_host(self, x: np.ndarray, cos: np.ndarray, sin: np.ndarray, out: np.ndarray) -> None:
        half, dim = self.rotary_dim // 2, self.rotary_dim
        first, second = x[:, :, :half], x[:, :, half:dim]
        np.multiply(first, cos, out=out[:, :, :half])
        out[:, :, :half] -= second * sin
        np.multiply(second, cos, out=out[:, :, half:dim])
        out[:, :, half:dim] += first * sin
        out[:, :, dim:] = x[:, :, dim:]
