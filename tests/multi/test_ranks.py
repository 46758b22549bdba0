"""The harness itself: a lost rank must fail a test within seconds, with that rank's words."""

import os
import signal
import subprocess
import time

import pytest

from tests.ranks import RanksFailed, run_cases, run_ranks


def add(rank, num_ranks, x):
    return {"rank": rank, "of": num_ranks, "x": x}


def all_reduce(rank, num_ranks):
    import paddle
    import paddle.distributed as dist

    from fastdeploy_fusion import groups

    groups.init_world()
    t = paddle.full([4], rank + 1.0)
    dist.all_reduce(t)
    return t.tolist()


def lose_rank_one(rank, num_ranks, how):
    if rank == 1:
        if how == "raise":
            raise ValueError("rank one is gone")
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def leave_a_child_and_raise(rank, num_ranks):
    subprocess.Popen(["sleep", "60"])
    raise ValueError("the reason")


def sleep(rank, num_ranks):
    time.sleep(60)


def test_results_come_back_in_rank_order():
    results = run_cases(2, [(add, 3), all_reduce])
    assert results == [[{"rank": 0, "of": 2, "x": 3}, {"rank": 1, "of": 2, "x": 3}], [[3.0] * 4] * 2]


@pytest.mark.parametrize("how, words", [("raise", "rank one is gone"), ("kill", "SIGKILL")])
def test_a_lost_rank_fails_within_seconds(how, words):
    start = time.monotonic()
    with pytest.raises(RanksFailed, match=words) as info:
        run_ranks(2, lose_rank_one, how)
    assert "1 of 2 ranks failed" in str(info.value)
    assert time.monotonic() - start < 8


def test_what_is_left_behind_does_not_hide_why():
    with pytest.raises(RanksFailed, match=r"(?s)the reason.*left behind: processes \['\d+ sleep 60'"):
        run_ranks(2, leave_a_child_and_raise)


def test_the_deadline_shows_where_each_rank_hangs():
    with pytest.raises(RanksFailed, match="not done after 2 s") as info:
        run_ranks(2, sleep, timeout_s=2)
    assert "in sleep" in str(info.value)


def test_observed_ranks_are_left_alone():
    gone, left = sorted(run_ranks(2, lose_early, on_failure="observe"), key=lambda o: o.rank != 1)
    assert gone.code == -signal.SIGKILL and left.code == 0 and left.results == ["still here"]


def lose_early(rank, num_ranks):
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.5)
    return "still here"
