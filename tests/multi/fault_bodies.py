"""What each rank does in the fault tests; the fault itself comes in by FDFUSION_FAULT."""

import logging
import os
import time
from typing import Any

import paddle

from fastdeploy_fusion import AllReduceFusion, FusionConfig, groups


class _Warnings(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def start_up(rank: int, num_ranks: int, fault: str) -> dict[str, Any]:
    """Open with a fault on one rank, then use it: what was agreed, how long it took, and the numbers after it."""
    os.environ["FDFUSION_FAULT"] = fault
    handler = _Warnings()
    logger = logging.getLogger("fastdeploy_fusion")
    logger.addHandler(handler)
    world = groups.init_world()
    started = time.monotonic()
    with AllReduceFusion.open(FusionConfig(enabled=True), group=world, hidden_size=8) as fusion:
        seconds = time.monotonic() - started
        total = fusion.all_reduce(paddle.full([2, 8], 10.0**rank))
        norm, _ = fusion.add_rms_norm(paddle.full([2, 8], 10.0**rank), paddle.ones([2, 8]), paddle.ones([8]), 1e-5)
        result = {
            "unavailable": fusion.state.unavailable,
            "seconds": seconds,
            "sum": float(total[0, 0]),
            "norm": float(norm[0, 0]),
            "paths": sorted({path for _, path, _ in fusion.counters}),
            "warnings": handler.texts,
            "mappings": mappings(),
        }
    logger.removeHandler(handler)
    os.environ["FDFUSION_FAULT"] = ""
    world.close()
    return result


def mappings() -> int:
    """Shared-memory mappings of this process that are ours."""
    with open("/proc/self/maps") as file:
        return sum("memfd:fastdeploy_fusion" in line for line in file)


def run_time(rank: int, num_ranks: int, backend: str, num_calls: int) -> str:
    """Calls until something goes wrong."""
    with AllReduceFusion.open(FusionConfig(enabled=True, backend=backend), hidden_size=8) as fusion:
        for _ in range(num_calls):
            total = fusion.all_reduce(paddle.full([2, 8], 10.0**rank))
            assert float(total[0, 0]) == sum(10.0**r for r in range(num_ranks))
    return "done"


def late_user(rank: int, num_ranks: int) -> list[Any]:
    """Growth before freeze, refusal after it; one workspace for all users of the ranks."""
    world = groups.init_world()
    config = FusionConfig(enabled=True)
    small = AllReduceFusion.open(config, group=world, hidden_size=8)
    first_backend = small._backend
    large = AllReduceFusion.open(config, group=world, hidden_size=64)
    grown = small._backend is large._backend and small._backend is not first_backend
    sums = [float(f.all_reduce(paddle.full([1, h], 10.0**rank))[0, 0]) for f, h in ((small, 8), (large, 64))]
    large.freeze()
    frozen_backend = large._backend
    late = AllReduceFusion.open(config, group=world, hidden_size=128)
    sums.append(float(late.all_reduce(paddle.full([1, 128], 10.0**rank))[0, 0]))
    reason = str(late.explain([1, 128]))
    fits = AllReduceFusion.open(config, group=world, hidden_size=32)
    untouched = fits._backend is small._backend is frozen_backend
    again = AllReduceFusion(world, config)
    again.all_reduce(paddle.full([1, 8], 1.0))
    for fusion in (late, fits, small, large, again):
        fusion.close()
    return [
        grown,
        untouched,
        sums,
        reason,
        {reason: calls for (_, _, reason), calls in again.counters.items()},
        mappings(),
    ]


def switching(rank: int, num_ranks: int) -> dict[str, Any]:
    """Off and on at step boundaries, together or not at all; and on where nothing was opened."""
    config = FusionConfig(enabled=True)
    told = ""
    with AllReduceFusion.open(config, hidden_size=8) as fusion:
        sums = []
        for enabled in (True, False, True):
            fusion.set_enabled(enabled)
            sums.append(float(fusion.all_reduce(paddle.full([1, 8], 10.0**rank))[0, 0]))
        try:
            fusion.set_enabled(rank == 0)
        except Exception as error:
            told = f"{type(error).__name__}: {error}"
        sums.append(float(fusion.all_reduce(paddle.full([1, 8], 10.0**rank))[0, 0]))
        paths = {path: calls for (_, path, _), calls in fusion.counters.items()}
    with AllReduceFusion.open(FusionConfig(), hidden_size=8) as never:
        never.set_enabled(True)
        sums.append(float(never.all_reduce(paddle.full([1, 8], 10.0**rank))[0, 0]))
        return {"sums": sums, "paths": paths, "told": told, "never": str(never.explain([1, 8]))}
