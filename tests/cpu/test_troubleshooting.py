"""Each reason has a meaning and a remedy, and docs/troubleshooting.md has them all."""

import re

import pytest

from fastdeploy_fusion import remedies
from fastdeploy_fusion.policy import Reason
from tests.cpu.reasons_in_code import reasons
from tests.generated_docs import check

TEXTS = dict(reversed(pair) for pair in reasons())


def test_every_decision_is_explained():
    assert set(remedies.DECISIONS) == set(Reason)


@pytest.mark.parametrize("text", TEXTS)
def test_every_text_in_the_code_has_a_remedy(text):
    assert remedies.find(text), (
        f"{TEXTS[text]}: {text!r} can be a reason and has no remedy: add one to fastdeploy_fusion/remedies"
    )


def test_the_scan_sees_the_code():
    """Known texts of each kind (returned, assigned, raised, composed), so that the scan can't fall silent."""
    for words in (
        "ranks 0 and 0 are on the same GPU",
        "shared memory needs Linux",
        "self-test: 0 of 0 0 is not finite",
        "no NVIDIA driver",
        "FlashInfer can't be used",
        "the mnnvl backend is not built",
        "died during",
    ):
        assert any(words in text for text in TEXTS), words
    assert len(TEXTS) > 50


def test_no_remedy_is_left_over():
    used = {remedies.find(text) for text in TEXTS}
    unused = [r.pattern for _, section in remedies.SECTIONS for r in section if r not in used]
    assert not unused


def test_what_comes_with_a_rank_and_a_step_is_found_too():
    nested = (
        "trtllm: rank 1: FlashInfer can't be used: torch: ModuleNotFoundError: No module named 'torch'; "
        "proxy: ModuleNotFoundError: No module named 'flashinfer'"
    )
    assert "flashinfer-python" in remedies.find(nested).action
    create = "rank 1 of the group (global rank 5): create failed: RuntimeError: something new"
    assert "The words after it" in remedies.find(create).action
    assert remedies.find("all is well") is None


def page() -> str:
    lines = ["## A call's reason", "", "| reason | means | do |", "|---|---|---|"]
    lines += [f"| `{reason.value}` | {' | '.join(remedies.DECISIONS[reason])} |" for reason in Reason]
    by_remedy: dict = {}
    for text in TEXTS:
        by_remedy.setdefault(remedies.find(text), []).append(readable(text))
    for title, section in remedies.SECTIONS:
        lines += ["", f"## {title}", "", "| text | means | do |", "|---|---|---|"]
        for remedy in section:
            texts = "<br>".join(f"`{text}`" for text in by_remedy.get(remedy, []))
            lines.append(f"| {texts} | {remedy.meaning} | {remedy.action} |")
    return "\n".join(lines)


def readable(text: str) -> str:
    """With an ellipsis for what is filled in, and nothing that ends a table's cell."""
    return re.sub(r"(?<![\d.])0(?!\d|\.\d)", "…", text).replace("|", "\\|")


def test_the_page_is_as_the_code():
    check("troubleshooting.md", "tests/cpu/test_troubleshooting.py", page())
