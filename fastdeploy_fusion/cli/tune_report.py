"""What `tune` prints and draws: every entry's limit, its regret beside the other limits', its curves."""

import re
from collections.abc import Sequence
from typing import Any

from .. import policy
from ..backends import WorkspacePlan
from ..config import FusionConfig
from ..opening import token_limits
from ..tuned import Entry
from ..tuning import regret

TARGET = 0.05
_COLOURS = {"fused": "#1f77b4", "pure": "#2ca02c", "plain": "#d62728"}


def limits(entry: Entry) -> dict[str, int]:
    """The limits to hold against each other: one number for all, the built-in table's, the measured one."""
    sm = re.search(r"SM(\d+)$", entry.device)
    plan = WorkspacePlan(entry.world_size, entry.hidden_size, entry.dtype, 1)
    built_in, _ = token_limits(entry.backend, FusionConfig(enabled=True), plan, int(sm[1]) if sm else None)
    return {"flat": policy.DEFAULT_NUM_MAX_TOKENS, "built-in": built_in, "tuned": entry.limit}


def rows(entry: Entry) -> list[dict[str, Any]]:
    """All that was measured for an entry: what the limit was found with, and the second look."""
    return [*entry.curve, *entry.check]


def heading(entry: Entry) -> str:
    reach = (
        f"up to {entry.limit} tokens" if entry.crossed else f"at every count up to {entry.limit}, the largest measured"
    )
    return (
        f"{entry.pattern}, hidden {entry.hidden_size} {entry.dtype}, {entry.world_size} ranks on {entry.device}, "
        f"{entry.backend} {entry.backend_version}, Paddle {entry.paddle}, {entry.mode}: fused {reach}"
    )


def text(entries: Sequence[Entry]) -> str:
    """Markdown: a table for each entry, and whether the target is met."""
    parts = []
    for entry in entries:
        parts += [f"**{heading(entry)}** (plain: {entry.how})", regret.table(rows(entry), limits(entry))]
        parts.append(verdict(entry))
    return "\n\n".join(parts)


def verdict(entry: Entry) -> str:
    """Whether the target is met at the counts that the search did not use; busy machines can leave it open."""
    looked_at = entry.check or entry.curve
    loss, tokens = regret.worst(looked_at, entry.limit)
    certain = max(regret.certain(row, entry.limit) for row in looked_at)
    word = "met" if loss <= TARGET else "missed" if certain > TARGET else "neither met nor missed for certain: noise"
    return (
        f"Second look, {len(entry.check)} counts that the search did not use: the chosen path is at most "
        f"{100 * loss:.1f}% slower than the fastest side (at {tokens} tokens), at most {100 * certain:.1f}% with 95% "
        f"confidence. Target of {100 * TARGET:.0f}%: {word}."
    )


def plot(entries: Sequence[Entry], path: str) -> None:
    """Microseconds against tokens, one panel an entry, with the limit. Needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    columns = min(2, len(entries))
    lines = -(-len(entries) // columns)
    figure, axes = pyplot.subplots(lines, columns, figsize=(6.2 * columns, 4.4 * lines), squeeze=False)
    for axis in axes.flat[len(entries) :]:
        axis.set_visible(False)
    for axis, entry in zip(axes.flat, entries, strict=False):
        _panel(axis, entry)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _panel(axis: Any, entry: Entry) -> None:
    found = sorted(rows(entry), key=lambda row: int(row["tokens"]))
    tokens = [row["tokens"] for row in found]
    for side in found[0]["us"]:
        middle = [row["us"][side] for row in found]
        margins = [row["us"][side] * row["spread"][side] for row in found]
        axis.errorbar(
            tokens, middle, yerr=margins, color=_COLOURS.get(side), marker="o", markersize=3, capsize=2, label=side
        )
    label = f"tuned limit {entry.limit}" + ("" if entry.crossed else " (largest measured)")
    axis.axvline(max(entry.limit, 0.7), color="black", linestyle="--", linewidth=1, label=label)
    axis.set(xscale="log", yscale="log", xlabel="tokens", ylabel=f"us a call ({entry.mode})")
    axis.set_xscale("log", base=2)
    axis.set_title(f"{entry.pattern}, hidden {entry.hidden_size} {entry.dtype}, {entry.world_size} ranks", fontsize=10)
    axis.grid(True, which="major", alpha=0.3)
    axis.legend(fontsize=8)
