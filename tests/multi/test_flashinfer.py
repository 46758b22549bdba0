"""The trtllm backend on two ranks without a GPU: all that is not the kernel (see fake_flashinfer.py)."""

import pytest

from tests.ranks import run_cases, run_ranks

pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi is not installed (it is in the test extra)")
BODIES = "tests.multi.flashinfer_bodies:"


@pytest.fixture(scope="module")
def results():
    cases = ["routes", "nothing_goes_stale", "odd_operands", "wrong_route_is_left"]
    return dict(zip(cases, run_cases(2, [BODIES + case for case in cases]), strict=True))


def test_every_route_gives_the_same_numbers(results):
    for rank in results["routes"]:
        assert rank["chosen"] == ("direct" if rank["exchangeable"] else "slots")
        assert all(rank["launches"].values())
        assert "closed" in rank["closed"]


def test_views_follow_the_tensors(results):
    assert results["nothing_goes_stale"] == ["ok", "ok"]
    assert results["odd_operands"] == ["ok", "ok"]


def test_a_bound_call_that_disagrees_is_left_by_all(results):
    for route, reason in results["wrong_route_is_left"]:
        assert route == "public"
        assert "differs from the public call" in reason


@pytest.mark.parametrize("fault", ["early", "middle"])
def test_one_rank_that_fails_takes_all_along(fault):
    first, second = run_ranks(2, BODIES + "one_rank_fails", fault)
    assert first.startswith("PeerFailed: rank 1: MemoryError: no memory")
    assert second.startswith("MemoryError: no memory")
