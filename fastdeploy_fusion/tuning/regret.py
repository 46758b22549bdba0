"""What a limit costs: how much slower the path it chooses is than the fastest one, count by count. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any

from .search import chosen

Row = Mapping[str, Any]
"""``{"tokens": .., "us": {side: microseconds}}``, as tables hold them."""


def regret(row: Row, limit: int) -> float:
    """0.05: the path that ``limit`` chooses takes 5% longer than the fastest side measured."""
    us = row["us"]
    return float(us[chosen(limit, row["tokens"])] / min(us.values()) - 1)


def certain(row: Row, limit: int) -> float:
    """The part of ``regret`` that is no noise, with 95% confidence (rounds of all sides were interleaved)."""
    return max(0.0, float(row["behind"][chosen(limit, row["tokens"])]) - 1)


def worst(rows: Sequence[Row], limit: int) -> tuple[float, int]:
    """(largest regret, the count at which it occurs)."""
    return max(((regret(row, limit), row["tokens"]) for row in rows), key=lambda found: found[0])


def table(rows: Sequence[Row], limits: Mapping[str, int]) -> str:
    """A Markdown table: times of all sides, the fastest of them, and the regret of each named limit."""
    sides = list(rows[0]["us"])
    names = [f"{name} ({limit})" for name, limit in limits.items()]
    lines = [_line(["tokens", *(f"{side}, us" for side in sides), "fastest", *names])]
    lines.append("|" + "---|" * (len(sides) + len(names) + 2))
    for row in sorted(rows, key=lambda row: int(row["tokens"])):
        us = row["us"]
        losses = [f"{100 * regret(row, limit):.1f}%" for limit in limits.values()]
        times = [_time(us[side]) for side in sides]
        lines.append(_line([str(row["tokens"]), *times, min(us, key=us.__getitem__), *losses]))
    worsts = [f"**{100 * worst(rows, limit)[0]:.1f}%**" for limit in limits.values()]
    lines.append(_line(["worst", *[""] * (len(sides) + 1), *worsts]))
    return "\n".join(lines)


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _time(us: float) -> str:
    return f"{us:.0f}" if us >= 100 else f"{us:.2f}"
