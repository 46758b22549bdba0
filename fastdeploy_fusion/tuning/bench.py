"""Times the sides at one token count on all ranks together, in interleaved rounds, until they are told apart."""

import time
from collections.abc import Callable
from typing import Any

from ..fusion import AllReduceFusion
from . import sides
from .search import Sample, is_settled

MODES = ("eager", "graph")
MIN_ROUNDS = 7
"""The fewest that can tell two sides apart with 95% confidence is six."""
MAX_ROUNDS = 61
BLOCK_S = 0.02
"""A block of one side's calls takes about this long: ranks leave a barrier up to 0.1 ms apart."""


class Bench:
    """Samples of one pattern and dtype. Collective: all ranks ask for the same counts in the same order.

    budget_s: seconds for one count; the rounds that are needed at least (``MIN_ROUNDS``) are made in any case.
    """

    def __init__(
        self, fusion: AllReduceFusion, pattern: str, dtype: str, *, mode: str, collective: str, budget_s: float
    ) -> None:
        self.fusion, self.group = fusion, fusion.group
        self.pattern, self.dtype = pattern, dtype
        self.mode, self.collective, self.budget_s = mode, collective, budget_s
        self.how = ""

    def sample(self, tokens: int, min_rounds: int = MIN_ROUNDS) -> Sample:
        """The slowest rank's time in each round; the same on all ranks."""
        calls, self.how = sides.make(self.fusion, self.pattern, tokens, self.dtype, self.collective)
        runners = {side: _Runner(call, self.mode, tokens) for side, call in calls.items()}
        try:
            self._size_blocks(runners)
            return self._rounds(tokens, runners, min_rounds)
        finally:
            for runner in runners.values():
                runner.close()

    def _size_blocks(self, runners: dict[str, "_Runner"]) -> None:
        """Equal numbers of calls on all ranks, by the slowest one's trial."""
        trials = []
        for runner in runners.values():
            runner.run(1)  # warms up
            trials.append(runner.run(1))
        slowest = _slowest(self.group.all_gather_object(trials))
        for runner, seconds in zip(runners.values(), slowest, strict=True):
            runner.blocks = max(1, min(500, int(BLOCK_S / seconds)))

    def _rounds(self, tokens: int, runners: dict[str, "_Runner"], min_rounds: int) -> Sample:
        began = time.monotonic()
        mine: dict[str, list[float]] = {side: [] for side in runners}
        order = list(runners)
        while True:
            for _ in range(4 if mine[order[0]] else min_rounds):
                for side in order:
                    self.group.barrier()
                    mine[side].append(runners[side].microseconds())
                order.append(order.pop(0))  # each side comes first, second, last in turn
            gathered = self.group.all_gather_object([mine, time.monotonic() - began])
            sample = Sample(tokens, {side: _slowest([times[side] for times, _ in gathered]) for side in mine})
            # Rank 0's clock, so that all ranks stop after the same round.
            if is_settled(sample) or gathered[0][1] > self.budget_s or len(mine[order[0]]) >= MAX_ROUNDS:
                return sample


def _slowest(by_rank: list[list[float]]) -> list[float]:
    """Round by round: a call ends when its last rank has the result."""
    return [max(times) for times in zip(*by_rank, strict=True)]


class _Runner:
    """One side's call, looped or captured. ``blocks``: repetitions between two looks at the clock."""

    def __init__(self, call: Callable[[], Any], mode: str, tokens: int) -> None:
        self._call = call
        self._gpu = sides.gpu()
        self._graph: Any = None
        self._calls_a_run = 1
        self.blocks = 1
        if mode == "graph" and self._gpu is not None:
            for _ in range(3):  # allocations and lazy loading happen before the capture
                call()
            self._gpu.synchronize()
            self._calls_a_run = 20 if tokens <= 1024 else 4
            self._graph = self._gpu.capture(lambda: [call() for _ in range(self._calls_a_run)][-1])

    def run(self, blocks: int) -> float:
        """Seconds of ``blocks`` runs, the GPU idle before and after."""
        run = self._call if self._graph is None else self._graph.replay
        if self._gpu is not None:
            self._gpu.synchronize()
        began = time.perf_counter()
        for _ in range(blocks):
            run()
        if self._gpu is not None:
            self._gpu.synchronize()
        return time.perf_counter() - began

    def microseconds(self) -> float:
        """Of one call."""
        return self.run(self.blocks) / (self.blocks * self._calls_a_run) * 1e6

    def close(self) -> None:
        if self._graph is not None and self._gpu is not None:
            self._gpu.synchronize()
            self._graph.kept = None
            self._graph.reset()
            self._graph = None
