"""A remedy: how to know a reason by its text, what it means, and what to do."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Remedy:
    """``pattern``: a regular expression found in the reason's text. ``action``: what to do, in Markdown."""

    pattern: str
    meaning: str
    action: str
