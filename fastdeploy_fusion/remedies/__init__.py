"""What each reason for the plain path, or for a failed start-up, means and what to do: the one place for both.

``doctor`` shows the remedy beside a reason; docs/troubleshooting.md is generated from here and from the texts in the
code (tests/cpu/test_troubleshooting.py), and the test fails when a text has no remedy.
"""

import re

from .backends import FLASHINFER, PLATFORM
from .decisions import DECISIONS
from .ranks import GROUP, START_UP
from .remedy import Remedy

__all__ = ["DECISIONS", "SECTIONS", "Remedy", "find"]

SECTIONS = (
    ("This machine and backend", PLATFORM),
    ("FlashInfer", FLASHINFER),
    ("This group of ranks", GROUP),
    ("Start-up and calls", START_UP),
)


def find(text: str) -> Remedy | None:
    """The remedy for a reason's text: the first whose pattern is found in it. None for a text of another origin."""
    for _, remedies in SECTIONS:
        for remedy in remedies:
            if re.search(remedy.pattern, text):
                return remedy
    return None
