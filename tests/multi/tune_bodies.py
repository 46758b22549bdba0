"""What each rank does in test_tune.py: opens with a table and says which limits it came to."""

import logging
import os
from pathlib import Path
from typing import Any

from fastdeploy_fusion import AllReduceFusion, FusionConfig, probe, tuned
from fastdeploy_fusion.backends import WorkspacePlan


class _Heard(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def _entry(backend_version: str, limit: int, pattern: str = "add_rms_norm") -> tuned.Entry:
    plan = WorkspacePlan(2, 64, "float32", 1)
    here = probe.rank_facts("shm", FusionConfig(enabled=True), plan)["tuned"]["here"]
    return tuned.Entry(
        **{**here, "backend_version": backend_version}, world_size=2, hidden_size=64, dtype="float32", pattern=pattern,
        limit=limit, crossed=True, measured_to=100,
    )  # fmt: skip


def limits(rank: int, num_ranks: int, folder: str, case: str) -> dict[str, Any]:
    """Opens with this rank's own table (a file a rank) as `case` says; the limits and what was logged."""
    path = Path(folder) / f"{case}.{rank}.json"
    os.environ["FDFUSION_TUNED_TABLE"] = str(path)
    version = "another" if case == "other version" else "2"
    if case != "only rank 1" or rank == 1:
        norm = 5000 + (rank if case == "ranks differ" else 0)
        tuned.write(path, [_entry(version, norm), _entry(version, 30, "all_reduce")])
    heard = _Heard()
    logging.getLogger("fastdeploy_fusion.opening").addHandler(heard)
    config = FusionConfig(enabled=True, num_max_tokens=9 if case == "flag" else None)
    with AllReduceFusion.open(config, hidden_size=64) as fusion:
        paths = [fusion.explain([tokens, 64]).path.value for tokens in (4000, 5001)]
        found = [fusion.state.num_max_tokens, fusion.state.all_reduce_max_tokens]
    return {"limits": found, "paths": paths, "log": heard.texts}
