"""From cases to table entries: opens the workspace, searches, looks a second time at other counts."""

import logging
import os
import time
from dataclasses import dataclass

from .. import policy, probe, tuned
from ..backends import WorkspacePlan, resolve
from ..config import FusionConfig
from ..errors import FusionError
from ..fusion import AllReduceFusion
from ..groups import RankGroup
from .bench import MIN_ROUNDS, Bench
from .search import Sample, check_counts, find_limit

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Plan:
    """What to measure. Equal on all ranks. budget_s: seconds for one token count; collective: whose NCCL on a GPU."""

    hidden_sizes: tuple[int, ...]
    dtypes: tuple[str, ...]
    patterns: tuple[str, ...] = tuned.PATTERNS
    max_tokens: int = 16384
    backend: str = "auto"
    mode: str = "eager"
    collective: str = "paddle"
    budget_s: float = 3.0


def tune(group: RankGroup, plan: Plan) -> list[tuned.Entry]:
    """Measure all cases of the plan. Collective; the same entries on all ranks.

    Raises:
        FusionError: there is nothing to tune (one rank, no fused backend), with the reason.
    """
    config = FusionConfig(enabled=True, backend=plan.backend, num_max_tokens=plan.max_tokens)
    if group.rank == 0:
        _warn_if_busy()
    entries = []
    for hidden in plan.hidden_sizes:
        for dtype in plan.dtypes:
            with AllReduceFusion.open(config, group=group, hidden_size=hidden, dtype=dtype) as fusion:
                decision = fusion.explain([plan.max_tokens, hidden], dtype=dtype)
                if decision.path is not policy.Path.FUSED:
                    raise FusionError(f"nothing to tune for hidden size {hidden} {dtype}: {decision}")
                here = _conditions(group, config, hidden, dtype)
                entries += [_measure(fusion, plan, here, dtype, pattern) for pattern in plan.patterns]
    return entries


def _warn_if_busy() -> None:
    busy, cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
    if busy > cores / 4:
        log.warning(
            "other processes keep %.1f of this machine's %d cores busy: limits found now may not hold on a quiet one",
            busy,
            cores,
        )


def _conditions(group: RankGroup, config: FusionConfig, hidden: int, dtype: str) -> dict[str, str]:
    name = resolve(config.backend, probe.device())
    facts = probe.rank_facts(name, config, WorkspacePlan(group.size, hidden, dtype, 1))
    here: dict[str, str] = facts["tuned"]["here"]
    group.check_equal(here, "tune")
    if not here["device"]:
        raise FusionError(f"a table needs to say what it holds for: {facts['tuned']['refusal']}")
    return here


def _measure(fusion: AllReduceFusion, plan: Plan, here: dict[str, str], dtype: str, pattern: str) -> tuned.Entry:
    bench = Bench(fusion, pattern, dtype, mode=plan.mode, collective=plan.collective, budget_s=plan.budget_s)
    say = log.info if fusion.rank == 0 else log.debug
    name = f"{pattern}, hidden {fusion.state.hidden_size} {dtype}"

    def measure(tokens: int, min_rounds: int = MIN_ROUNDS) -> Sample:
        sample = bench.sample(tokens, min_rounds)
        say("%s, %s", name, describe(sample))
        return sample

    limit, crossed, curve = find_limit(measure, plan.max_tokens)
    say("%s: fused up to %d tokens; a second look at other counts", name, limit)
    counts = check_counts(plan.max_tokens, limit, {sample.tokens for sample in curve})
    check = [measure(tokens, 2 * MIN_ROUNDS) for tokens in counts]
    return tuned.Entry(
        **here,
        world_size=fusion.world_size,
        hidden_size=fusion.state.hidden_size,
        dtype=dtype,
        pattern=pattern,
        limit=limit,
        crossed=crossed,
        measured_to=plan.max_tokens,
        mode=plan.mode,
        how=bench.how,
        date=time.strftime("%Y-%m-%d"),
        curve=[sample.to_dict() for sample in curve],
        check=[sample.to_dict() for sample in check],
    )


def describe(sample: Sample) -> str:
    """One line: medians and spreads of all sides."""
    sides = [f"{side} {sample.median(side):.1f} us (+-{100 * sample.spread(side):.0f}%)" for side in sample.rounds]
    return f"{sample.tokens} tokens: {', '.join(sides)}, {len(next(iter(sample.rounds.values())))} rounds"
