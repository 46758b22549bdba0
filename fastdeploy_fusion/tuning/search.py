"""Where the fused path stops being the faster one: pure functions of measured times.

All ranks hold the same samples (each gathers all), so all of them take the same next step.
"""

import math
import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

CHOICES = ("fused", "plain")
"""Sides that the policy can choose between; the others are measured to know what is left on the table."""

CONFIDENCE = 0.95
RESOLUTION = 1.05
"""Bisection ends when the bracket's ends are this near: the sides are then closer than that as well."""


@dataclass(frozen=True)
class Sample:
    """Times at one token count: side -> microseconds a call in each round, rounds of all sides interleaved."""

    tokens: int
    rounds: Mapping[str, Sequence[float]]

    def median(self, side: str) -> float:
        return statistics.median(self.rounds[side])

    def spread(self, side: str) -> float:
        """Half of the interquartile range, as a share of the median."""
        times = sorted(self.rounds[side])
        quarter = len(times) // 4
        return (times[-1 - quarter] - times[quarter]) / 2 / self.median(side)

    def merged(self, other: "Sample") -> "Sample":
        """This sample with the rounds of another one of the same count, taken at another time."""
        return Sample(self.tokens, {side: [*times, *other.rounds[side]] for side, times in self.rounds.items()})

    def behind(self) -> dict[str, tuple[float, float]]:
        """Side -> confidence interval of its time over the fastest side's, round by round."""
        fastest = min(self.rounds, key=self.median)
        return {side: ratio_interval(times, self.rounds[fastest]) for side, times in self.rounds.items()}

    def to_dict(self) -> dict[str, Any]:
        """What tables hold. ``behind`` is the lower end of ``behind()``: so much slower it is for certain."""
        return {
            "tokens": self.tokens,
            "behind": {side: round(low, 4) for side, (low, _) in self.behind().items()},
            "us": {side: round(self.median(side), 3) for side in self.rounds},
            "spread": {side: round(self.spread(side), 4) for side in self.rounds},
            "rounds": len(next(iter(self.rounds.values()))),
        }


def ratio_interval(
    first: Sequence[float], second: Sequence[float], confidence: float = CONFIDENCE
) -> tuple[float, float]:
    """A confidence interval of the median of ``first / second``, round by round (order statistics; no distribution is
    assumed, and drift that hits both sides of a round cancels). ``(0, inf)`` where the rounds are too few for any."""
    ratios = sorted(a / b for a, b in zip(first, second, strict=True))
    count = len(ratios)
    outside = 0.0  # probability that the median lies below the k-th smallest, or above the k-th largest
    for k in range(count // 2 + 1):
        outside += 2 * math.comb(count, k) / 2**count
        if outside > 1 - confidence:
            return (ratios[k - 1], ratios[count - k]) if k else (0.0, math.inf)
    return ratios[0], ratios[-1]


def verdict(sample: Sample) -> int:
    """1: fused is faster than plain, -1: slower, with confidence; 0: can't be told apart."""
    low, high = ratio_interval(sample.rounds["fused"], sample.rounds["plain"])
    return 1 if high < 1 else -1 if low > 1 else 0


def is_settled(sample: Sample, tolerance: float = 0.02) -> bool:
    """Whether more rounds would change nothing: told apart, or known to lie within ``tolerance`` of each other."""
    low, high = ratio_interval(sample.rounds["fused"], sample.rounds["plain"])
    return high < 1 or low > 1 or (low > 1 - tolerance and high < 1 + tolerance)


def chosen(limit: int, tokens: int) -> str:
    """The side that a limit stands for."""
    return "fused" if tokens <= limit else "plain"


def best_limit(samples: Sequence[Sample]) -> int:
    """The limit, among 0 and the measured counts, whose worst loss against the better choice is smallest.

    One noisy sample, or curves that cross more than once, move it less than "the first count at which plain wins".
    Of equal ones the limit with the smallest sum of losses is taken.
    """

    def losses(limit: int) -> list[float]:
        return [
            math.log(sample.median(chosen(limit, sample.tokens)) / min(sample.median(side) for side in CHOICES))
            for sample in samples
        ]

    candidates = [0, *sorted(sample.tokens for sample in samples)]
    return min(candidates, key=lambda limit: (round(max(losses(limit)), 3), sum(losses(limit))))


def powers_of_two(largest: int) -> list[int]:
    """1, 2, 4 .. and ``largest`` itself."""
    counts = [1 << k for k in range(largest.bit_length()) if 1 << k <= largest]
    return counts if counts[-1] == largest else [*counts, largest]


def check_counts(largest: int, limit: int, measured: Collection[int]) -> list[int]:
    """Counts for a second look that the search did not measure: between powers of two, and around the limit."""
    between = {round(1.5 * (1 << k)) for k in range(1, largest.bit_length())}
    near = {round(limit * factor) for factor in (0.8, 0.95, 1.05, 1.25)} if limit > 2 else set()
    return sorted(count for count in between | near if 2 < count <= largest and count not in measured)


def find_limit(measure: Callable[[int], Sample], max_tokens: int) -> tuple[int, bool, list[Sample]]:
    """``(limit, crossed, samples by tokens)``: powers of two first, then bisection of the bracket that holds the limit.

    The powers of two are gone through twice, so that a disturbance of some seconds can't pose as a crossing, and a
    bracket's upper end is believed after a third look. ``crossed``: False when fused is the better choice up to
    ``max_tokens``.
    """
    samples: dict[int, Sample] = {}

    def look(count: int) -> int:
        sample = measure(count)
        samples[count] = samples[count].merged(sample) if count in samples else sample
        return verdict(samples[count])

    for count in 2 * powers_of_two(max_tokens):
        look(count)
    believed = -1
    while True:
        low = best_limit(list(samples.values()))
        high = min((count for count in samples if count > low), default=None)
        if high is None or high == believed:
            break
        look(high)
        believed = high
    while high is not None and low and high - low > 1 and high > low * RESOLUTION:
        middle = _between(low, high)
        side = look(middle)
        if side == 0:
            low = middle
            break
        low, high = (middle, high) if side > 0 else (low, middle)
    return low, high is not None, [samples[count] for count in sorted(samples)]


def _between(low: int, high: int) -> int:
    """The geometric middle, as a multiple of 16 where there is one in between (a kernel's rows come in tiles)."""
    middle = round(math.sqrt(low * high))
    tiled = middle // 16 * 16
    return tiled if low < tiled < high else min(max(middle, low + 1), high - 1)
