"""Rotary position embedding."""

from typing import Any

import numpy as np
import paddle

from . import ops
from .yarn import YarnScaling


class RotaryEmbedding:
    """Rotates the first ``rotary_dim`` of each head, halves paired (``x[i]`` with ``x[i + rotary_dim / 2]``).

    ``interleaved``: neighbours are paired (``x[2 * i]`` with ``x[2 * i + 1]``). The result has the first of all pairs,
    then the second: another order than came in, the same for queries and keys, whose products it does not change.
    """

    def __init__(
        self, rotary_dim: int, theta: float, *, interleaved: bool = False, yarn: YarnScaling | None = None
    ) -> None:
        if rotary_dim <= 0 or rotary_dim % 2:
            raise ValueError(f"rotary_dim is {rotary_dim}; it must be even and positive: correct partial_rotary_factor")
        if theta <= 0:
            raise ValueError(f"rope_theta is {theta}; it must be positive")
        self.rotary_dim, self.interleaved = rotary_dim, interleaved
        exponents = np.arange(0, rotary_dim, 2, dtype=np.float32) / np.float32(rotary_dim)
        self.frequencies = (1.0 / np.power(np.float32(theta), exponents)).astype(np.float32)
        self.factor = np.float32(1.0)
        if yarn is not None:
            self.frequencies = yarn.stretch(self.frequencies, rotary_dim, theta)
            self.factor = np.float32(yarn.rotation_factor)

    def angles(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Cosines and sines, float32 ``[num_tokens, 1, rotary_dim / 2]``."""
        angles = positions.astype(np.float32)[:, None, None] * self.frequencies
        return np.cos(angles) * self.factor, np.sin(angles) * self.factor

    def rotate(self, x: Any, cos: Any, sin: Any) -> Any:
        """``x [num_tokens, heads, head_dim]``, rotated in float32; same shape and dtype, a new tensor.

        ``cos`` and ``sin`` as of ``angles``: arrays for a CPU tensor, else tensors.
        """
        wide = ops.cast(x, paddle.float32)
        if isinstance(cos, np.ndarray):
            out = ops.host_empty(wide.shape)
            self._rotate_host(ops.host_array(wide), cos, sin, ops.host_array(out))
            return ops.cast(out, x.dtype)
        dim = self.rotary_dim
        first, second = self._pairs(wide)
        parts = [first * cos - second * sin, second * cos + first * sin, wide[:, :, dim:]]
        return ops.cast(paddle.concat(parts if dim < x.shape[-1] else parts[:2], axis=-1), x.dtype)

    def _pairs(self, x: Any) -> tuple[Any, Any]:
        half, dim = self.rotary_dim // 2, self.rotary_dim
        if self.interleaved:
            return x[:, :, 0:dim:2], x[:, :, 1:dim:2]
        return x[:, :, :half], x[:, :, half:dim]

    def _rotate_host(self, x: np.ndarray, cos: np.ndarray, sin: np.ndarray, out: np.ndarray) -> None:
        half, dim = self.rotary_dim // 2, self.rotary_dim
        first, second = self._pairs(x)
        np.multiply(first, cos, out=out[:, :, :half])
        out[:, :, :half] -= second * sin
        np.multiply(second, cos, out=out[:, :, half:dim])
        out[:, :, half:dim] += first * sin
        out[:, :, dim:] = x[:, :, dim:]
