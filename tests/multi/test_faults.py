"""Every start-up step and the calls after it, on each rank, with each kind of fault: agreed, bounded, cleaned up.

The table in docs/reliability.md is written by this file: FDFUSION_WRITE_DOCS=1 pytest tests/multi/test_faults.py
"""

import os
from pathlib import Path

import pytest

from fastdeploy_fusion.faults import STEPS
from tests.multi import fault_bodies as bodies
from tests.ranks import run_cases, run_ranks

START_UP = [step for step in STEPS if step != "call"]
OPEN_TIMEOUT_S = 4.0
CALL_TIMEOUT_S = 3.0
ENV = {"FDFUSION_OPEN_TIMEOUT_S": f"{OPEN_TIMEOUT_S:g}", "FDFUSION_CALL_TIMEOUT_S": f"{CALL_TIMEOUT_S:g}"}
DOCS = Path(__file__).parents[2] / "docs/reliability.md"
rows: list[tuple[str, str, str, str]] = []


@pytest.fixture(scope="module", autouse=True)
def table():
    yield
    if os.environ.get("FDFUSION_WRITE_DOCS") == "1":
        write_table()


def write_table() -> None:
    marker = "<!-- table -->"
    head, _, tail = DOCS.read_text().partition(marker)
    _, _, tail = tail.partition(marker)
    lines = ["| where | rank | kind | what all ranks did |", "|---|---|---|---|"]
    lines += [f"| {' | '.join(row)} |" for row in rows]
    DOCS.write_text(head + marker + "\n" + "\n".join(lines) + "\n" + marker + tail)


@pytest.mark.parametrize("kind", ["raise", "none", "hang"])
def test_a_start_up_fault_makes_all_ranks_stand_down_together(kind):
    """Three ranks, every step on the first and the last: right sums by the plain path, one reason, nothing kept."""
    cases = [(step, rank) for step in START_UP for rank in (0, 2)]
    results = run_cases(3, [(bodies.start_up, f"{step}:{rank}:{kind}") for step, rank in cases], timeout_s=170, env=ENV)
    for (step, rank), per_rank in zip(cases, results, strict=True):
        reasons = {result["unavailable"] for result in per_rank}
        assert len(reasons) == 1, reasons
        reason = reasons.pop()
        assert f"rank {rank} of the group" in reason and step in reason, reason
        for result in per_rank:
            assert result["sum"] == 111.0 and abs(result["norm"] - 1) < 1e-5
            assert result["paths"] == ["plain"] and result["mappings"] == 0
            assert result["seconds"] < OPEN_TIMEOUT_S + 1
            assert len(result["warnings"]) == 1 and reason in result["warnings"][0]
        slowest = max(result["seconds"] for result in per_rank)
        rows.append((step, str(rank), kind, f"stood down in {slowest:.1f} s, sums right by the plain path"))


@pytest.mark.parametrize("step", START_UP)
@pytest.mark.parametrize("rank", [0, 2])
def test_a_rank_killed_at_start_up_is_named_by_the_others(step, rank):
    outcomes = run_ranks(3, bodies.start_up, f"{step}:{rank}:kill", timeout_s=60, env=ENV, on_failure="observe")
    assert outcomes[rank].code == -9
    for outcome in outcomes:
        if outcome.rank != rank:
            assert outcome.code == 1 and not outcome.ended_by_harness
            assert f"rank {rank} of the group (global rank {rank}) died" in outcome.stderr, outcome.stderr
    longest = max(o.seconds for o in outcomes) - outcomes[rank].seconds
    assert longest < OPEN_TIMEOUT_S + 2
    rows.append((step, str(rank), "kill", f"the others ended within {longest:.1f} s, naming rank {rank}"))


@pytest.mark.parametrize("backend", ["shm", "plain"])
@pytest.mark.parametrize(("kind", "words"), [("raise", "injected fault at call"), ("none", "NoneType"), ("kill", "")])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_fault_in_a_call_ends_all_ranks(backend, kind, words, rank):
    fault = f"call:{rank}:{kind}:3"
    env = {**ENV, "FDFUSION_FAULT": fault}
    outcomes = run_ranks(2, bodies.run_time, backend, 10, timeout_s=60, env=env, on_failure="observe")
    faulty, other = outcomes[rank], outcomes[1 - rank]
    assert faulty.code == (-9 if kind == "kill" else 1) and words in faulty.stderr
    assert other.code == 1 and "PeerLost" in other.stderr and f"rank {rank} of the group" in other.stderr
    assert not other.ended_by_harness
    rows.append((f"call, {backend}", str(rank), kind, "the faulty rank its own error, the other one naming it"))


@pytest.mark.parametrize("backend", ["shm", "plain"])
def test_a_rank_that_hangs_in_a_call_is_named_in_time(backend):
    env = {**ENV, "FDFUSION_FAULT": "call:1:hang:3"}
    outcomes = run_ranks(2, bodies.run_time, backend, 10, timeout_s=20, env=env, on_failure="observe_first")
    assert outcomes[0].code == 1 and "rank 1 of the group" in outcomes[0].stderr
    assert f"within {CALL_TIMEOUT_S:g} s" in outcomes[0].stderr
    rows.append((f"call, {backend}", "1", "hang", f"named after the limit ({CALL_TIMEOUT_S:g} s in this test)"))


def test_workspaces_grow_before_freeze_and_are_shared():
    for result in run_ranks(2, bodies.late_user):
        grown, untouched, sums, reason, counters, mapped = result
        assert grown and untouched
        assert sums == [11.0, 11.0, 11.0]
        assert reason.startswith("plain: no fused backend for this group (the workspace is frozen at hidden size 64")
        assert counters == {"no fused backend for this group": 1}
        assert mapped == 0


def test_fusing_is_switched_on_all_ranks_at_the_same_call():
    for result in run_ranks(2, bodies.switching):
        assert result["sums"] == [11.0] * 5
        assert result["paths"] == {"fused": 3, "plain": 1}
        assert "set_enabled" in result["told"] and "brings True" in result["told"] and "brings False" in result["told"]
        assert result["never"] == "plain: no fused backend for this group (fusion was off at start-up)"
