"""YaRN: rotary frequencies stretched to longer contexts (Peng et al., 2023), as DeepSeek and Qwen use it."""

import math
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class YarnScaling:
    """How far positions are stretched, and what that does to the attention's scale.

    factor: by how much. original_max_positions: what the model was first trained for. beta_fast, beta_slow: frequencies
    that turn more often than ``beta_fast`` times in that length stay, those below ``beta_slow`` are stretched in full,
    and those between in part. mscale, mscale_all_dim, attention_factor: see the properties.
    """

    factor: float
    original_max_positions: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    attention_factor: float | None = None
    truncate: bool = True

    def stretch(self, frequencies: np.ndarray, rotary_dim: int, theta: float) -> np.ndarray:
        """float32 ``[rotary_dim / 2]``, stretched."""
        low, high = (self._dim_that_turns(beta, rotary_dim, theta) for beta in (self.beta_fast, self.beta_slow))
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, rotary_dim - 1)
        width = high - low or 0.001
        stretched = np.clip((np.arange(rotary_dim // 2, dtype=np.float32) - low) / width, 0, 1)
        return (frequencies / self.factor * stretched + frequencies * (1 - stretched)).astype(np.float32)

    @property
    def rotation_factor(self) -> float:
        """What cosines and sines are multiplied by."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self._mscale(self.mscale) / self._mscale(self.mscale_all_dim)
        return self._mscale(1.0)

    @property
    def softmax_factor(self) -> float:
        """What latent attention multiplies its scores by besides."""
        return self._mscale(self.mscale_all_dim) ** 2 if self.mscale_all_dim else 1.0

    def _mscale(self, weight: float) -> float:
        return 1.0 if self.factor <= 1 else 0.1 * weight * math.log(self.factor) + 1.0

    def _dim_that_turns(self, times: float, rotary_dim: int, theta: float) -> float:
        """The dimension whose frequency turns so often over the original length."""
        return rotary_dim * math.log(self.original_max_positions / (times * 2 * math.pi)) / (2 * math.log(theta))
