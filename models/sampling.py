"""Choosing the next token, on the host, from logits that are the same bytes on every rank."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class SamplingParams:
    """``temperature`` 0 is greedy. ``top_p`` keeps the smallest set of tokens whose probability reaches it.

    ``seed`` None takes a fresh one, the same on all ranks. ``ignore_eos`` goes on to ``max_new_tokens``.
    """

    max_new_tokens: int = 16
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens is {self.max_new_tokens}; it must be at least 1")
        if not 0.0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature is {self.temperature}; it must be finite and not negative (0 is greedy)")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p is {self.top_p}; it must be above 0 and at most 1 (1 keeps every token)")
        if self.seed is not None and self.seed < 0:
            raise ValueError(f"seed is {self.seed}; it must not be negative")


class Sampler:
    """One sequence's choices. Its random numbers depend on the seed and the prompt's index only, not on the batch."""

    def __init__(self, params: SamplingParams, seed: int, index: int) -> None:
        self.params = params
        self.rng = np.random.default_rng([seed, index])

    def choose(self, logits: np.ndarray) -> int:
        """The next token id for float32 ``logits [vocab_size]``; ties go to the lowest id."""
        if self.params.temperature == 0.0:
            return int(logits.argmax())
        # The maximum first: at temperatures next to 0 the quotients are no longer finite, and differences of them NaN.
        with np.errstate(over="ignore"):
            probabilities = np.exp((logits.astype(np.float64) - logits.max()) / self.params.temperature)
        probabilities /= probabilities.sum()
        order = np.argsort(-probabilities, kind="stable")
        cumulative = np.cumsum(probabilities[order])
        kept = int(np.searchsorted(cumulative, self.params.top_p)) + 1 if self.params.top_p < 1.0 else len(order)
        kept = min(kept, len(order))
        point = self.rng.random() * cumulative[kept - 1]
        return int(order[min(int(np.searchsorted(cumulative[:kept], point, side="right")), kept - 1)])
