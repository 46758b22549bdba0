"""Measured token limits: the table that ``fastdeploy-fusion tune`` writes and start-up reads. No Paddle.

A limit holds for what it was measured on: the device, the backend and its version, Paddle's version, the number of
ranks, the hidden size, the dtype and the pattern. Anything else is refused with a reason, never scaled or guessed.
"""

import contextlib
import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from . import env

FORMAT = 1
"""Version of the file's layout; a table of another one is refused."""

PATTERNS = ("add_rms_norm", "all_reduce")
_CONDITIONS = ("device", "backend", "backend_version", "paddle")


@dataclass(frozen=True)
class Entry:
    """One measured limit: up to ``limit`` tokens the fused path is taken, above it the plain one.

    device .. paddle: what it was measured on, and so holds for. world_size .. pattern: the case.
    crossed: False when the fused path was still ahead at ``measured_to``, the largest count measured.
    mode: ``eager`` or ``graph``. how: how the plain side added up and normalised, in words.
    curve: ``{"tokens": 8, "us": {"fused": .., "pure": .., "plain": ..}, "spread": {..}, "behind": {..}, "rounds": 9}``
        by tokens; what the limit was found with. check: the same at counts that the search did not look at.
    """

    device: str
    backend: str
    backend_version: str
    paddle: str
    world_size: int
    hidden_size: int
    dtype: str
    pattern: str
    limit: int
    crossed: bool
    measured_to: int
    mode: str = "eager"
    how: str = ""
    date: str = ""
    curve: list[dict[str, Any]] = field(default_factory=list)
    check: list[dict[str, Any]] = field(default_factory=list)

    @property
    def case(self) -> tuple[Any, ...]:
        """What a newer measurement replaces."""
        return (self.device, self.backend, self.world_size, self.hidden_size, self.dtype, self.pattern)


def table_path() -> Path | None:
    """Where the table is: ``FDFUSION_TUNED_TABLE``, else in the user's cache folder; None where that says ``off``."""
    named = env.text("FDFUSION_TUNED_TABLE")
    if named == "off":
        return None
    if named:
        return Path(named)
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "fastdeploy_fusion" / "tuned.json"


def read(path: Path) -> list[Entry]:
    """All entries of a table.

    Raises:
        OSError: it can't be read.
        ValueError: it is no table, or one of another format version; the message says which.
    """
    document = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(document, dict) or "format" not in document:
        raise ValueError("it is not a tuned table: it has no format version")
    if document["format"] != FORMAT:
        raise ValueError(f"its format version is {document['format']} and this library reads {FORMAT}; run tune again")
    try:
        return [_entry(values) for values in document["entries"]]
    except (KeyError, TypeError) as error:
        raise ValueError(f"it is damaged: {type(error).__name__}: {error}") from error


def _entry(values: dict[str, Any]) -> Entry:
    entry = Entry(**values)
    numbers = (entry.world_size, entry.hidden_size, entry.limit, entry.measured_to)
    if not all(isinstance(number, int) and number >= 0 for number in numbers) or entry.pattern not in PATTERNS:
        raise TypeError(f"an entry holds sizes {numbers} for pattern {entry.pattern!r}")
    return entry


def write(path: Path, entries: Sequence[Entry]) -> None:
    """Put ``entries`` into the table at ``path``, in place of older ones of the same cases; other entries stay.

    A table that can't be read (another format, damaged) is replaced. The file appears whole or not at all.
    """
    kept: list[Entry] = []
    with contextlib.suppress(OSError, ValueError):
        kept = read(path)
    replaced = {entry.case for entry in entries}
    kept = [entry for entry in kept if entry.case not in replaced]
    document = {"format": FORMAT, "entries": [asdict(entry) for entry in (*kept, *entries)]}
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".part")
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        json.dump(document, file, indent=1)
    os.replace(name, path)


def conditions(device: str, backend: str, backend_version: str, paddle: str) -> dict[str, str]:
    """What a limit holds for, besides the case."""
    return {"device": device, "backend": backend, "backend_version": backend_version, "paddle": paddle}


def no_view(refusal: str | None, here: dict[str, str] | None = None) -> dict[str, Any]:
    """A view (see ``rank_view``) of no table."""
    return {"here": here or dict.fromkeys(_CONDITIONS, ""), "limits": [], "source": "", "refusal": refusal}


def rank_view(here: dict[str, str]) -> dict[str, Any]:
    """One rank's table as far as it holds ``here`` (see ``conditions``). JSON-able; never raises.

    ``limits``: ``[world_size, hidden_size, dtype, pattern, tokens, crossed]`` each. ``source``: the file, "" where
    there is none. ``refusal``: None, or why a table that is there is not used.
    """
    view = no_view(None, here)
    try:
        path = table_path()
        if path is None or not path.exists():
            return view
        view["source"] = str(path)
        entries = read(path)
        usable = [entry for entry in entries if mismatch(entry, here) is None]
        view["limits"] = [[e.world_size, e.hidden_size, e.dtype, e.pattern, e.limit, e.crossed] for e in usable]
        if not usable:
            reasons = [mismatch(entry, here) for entry in entries if entry.backend == here["backend"]]
            view["refusal"] = reasons[-1] if reasons else f"it holds nothing for the {here['backend']} backend"
    except Exception as error:
        view["refusal"] = str(error) if type(error) is ValueError else f"{type(error).__name__}: {error}"
    return view


def mismatch(entry: Entry, here: dict[str, str]) -> str | None:
    """In what the entry was measured on something else, in words; None when it holds here."""
    for name in _CONDITIONS:
        there = getattr(entry, name)
        if there != here[name]:
            return f"it was measured with {name.replace('_', ' ')} {there!r}, and here it is {here[name]!r}"
    return None


def agree(views: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The view that all ranks of a group use: the first rank's. Pure; equal on all ranks, as the views were gathered.

    It is refused when another rank runs on something that the table was not measured on.
    """
    first = views[0]
    for rank, view in enumerate(views):
        for name in _CONDITIONS:
            mine, theirs = first["here"][name], view["here"][name]
            if first["limits"] and theirs != mine:
                refusal = f"{name.replace('_', ' ')} is {mine!r} on rank 0 and {theirs!r} on rank {rank}"
                return {**first, "limits": [], "refusal": refusal}
    return first


def notes(views: Sequence[dict[str, Any]]) -> list[str]:
    """What rank 0 should log about the tables that were found; nothing where no rank has one."""
    used = agree(views)
    found = []
    if used["refusal"] is not None:
        found.append(f"tuned table {used['source']} is not used: {used['refusal']}")
    for rank, view in enumerate(views):
        if view["limits"] != views[0]["limits"]:
            theirs = view["source"] or "none"
            found.append(f"rank {rank} has another tuned table ({theirs}); all ranks use rank 0's")
    return found


def limits_of(
    view: dict[str, Any] | None, world_size: int, hidden_size: int, dtype: str
) -> dict[str, tuple[int, bool]]:
    """Pattern -> (tokens, whether fused was slower above) of one case, from what was agreed; empty where the case was
    not measured."""
    case = [world_size, hidden_size, dtype]
    rows = (view or {}).get("limits", [])
    return {pattern: (tokens, crossed) for *where, pattern, tokens, crossed in rows if where == case}
