"""Parts of docs/ that tests write: FDFUSION_WRITE_DOCS=1 writes them, every other run checks that they are current."""

import os
from pathlib import Path

DOCS = Path(__file__).resolve().parents[1] / "docs"
MARKER = "<!-- generated: {name} -->"


def check(page: str, name: str, text: str) -> None:
    """The part of a page between its two markers is ``text``; written there first if FDFUSION_WRITE_DOCS is 1."""
    path, marker = DOCS / page, MARKER.format(name=name)
    before, found, rest = path.read_text(encoding="utf-8").partition(marker)
    assert found and rest.count(marker) == 1, f"{path} needs {marker} twice, around the generated part"
    written, _, after = rest.partition(marker)
    text = "\n\n" + text.strip("\n") + "\n\n"
    if os.environ.get("FDFUSION_WRITE_DOCS") == "1":
        path.write_text(before + marker + text + marker + after, encoding="utf-8")
        return
    assert written == text, f"{path} is stale: run FDFUSION_WRITE_DOCS=1 pytest {name}"
