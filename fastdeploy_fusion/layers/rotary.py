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

    def angles(self, positions: np.ndarray, place: Any) -> tuple[Any, Any]:
        """Cosines, and sines negated for the first half: float32 ``[num_tokens, 1, rotary_dim]``, for ``rotate``."""
        angles = positions.astype(np.float32)[:, None, None] * self.frequencies
        cos, sin = np.cos(angles), np.sin(angles)
        tables = np.concatenate([cos, cos], -1), np.concatenate([-sin, sin], -1)
        return paddle.to_tensor(tables[0], place=place), paddle.to_tensor(tables[1], place=place)

    def rotate(self, x: Any, cos: Any, sin: Any) -> Any:
        """``x [num_tokens, heads, head_dim]``, rotated in float32; same shape and dtype."""
        half, dim = self.rotary_dim // 2, self.rotary_dim
        wide = ops.cast(x, paddle.float32)
        turning = wide[:, :, :dim] if dim < x.shape[-1] else wide
        swapped = paddle.concat([turning[:, :, half:], turning[:, :, :half]], axis=-1)
        rotated = turning * cos + swapped * sin
        if dim < x.shape[-1]:
            rotated = paddle.concat([rotated, wide[:, :, dim:]], axis=-1)
        return ops.cast(rotated, x.dtype)
