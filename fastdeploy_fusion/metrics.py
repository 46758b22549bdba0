"""Counters of open fusions as Prometheus text, for an engine's ``/metrics``. It reads and never resets.

from fastdeploy_fusion.metrics import prometheus_text
body = prometheus_text(fusion)               # or parallel.tp, parallel.moe
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .fusion import AllReduceFusion

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""To be sent with the text."""

_FAMILIES = (
    ("fdfusion_sums_total", "counter", "Sums over ranks, by the site that owed them, the path taken and why."),
    ("fdfusion_workspace_ready", "gauge", "1 where start-up agreed on a fused backend, else 0 with the reason."),
    ("fdfusion_token_limit", "gauge", "More tokens than this take the plain path; 0 without a workspace."),
)


def prometheus_text(*fusions: "AllReduceFusion") -> str:
    """All counters of this rank's ``fusions`` in Prometheus' text format 0.0.4; one given twice counts once."""
    distinct = list({id(fusion): fusion for fusion in fusions}.values())
    samples = [list(_samples(fusion)) for fusion in distinct]
    lines = []
    for name, kind, meaning in _FAMILIES:
        lines += [f"# HELP {name} {meaning}", f"# TYPE {name} {kind}"]
        lines += [line for own in samples for family, line in own if family == name]
    return "\n".join(lines) + "\n"


def _samples(fusion: "AllReduceFusion") -> Iterator[tuple[str, str]]:
    """``(family, line)``."""
    ranks = fusion.group.ranks
    who = {"rank": str(ranks[fusion.rank]), "ranks": ",".join(map(str, ranks))}
    for (site, op, path, reason), calls in sorted(fusion.site_counters.items()):
        labels = {**who, "site": site, "op": op, "path": path, "reason": reason}
        yield _FAMILIES[0][0], f"{_FAMILIES[0][0]}{_braces(labels)} {calls}"
    state = fusion.state
    labels = {**who, "backend": state.backend, "reason": state.unavailable or ""}
    yield _FAMILIES[1][0], f"{_FAMILIES[1][0]}{_braces(labels)} {int(state.unavailable is None)}"
    yield _FAMILIES[2][0], f"{_FAMILIES[2][0]}{_braces(who)} {state.num_max_tokens if state.unavailable is None else 0}"


def _braces(labels: dict[str, str]) -> str:
    return "{" + ",".join(f'{name}="{_escape(value)}"' for name, value in labels.items()) + "}"


def _escape(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
