"""Workspaces with several users: shared, grown, refused and frozen alike on all ranks."""

import os

from tests.multi import workspace_bodies as bodies
from tests.ranks import run_cases


def test_workspaces_with_several_users():
    cores, backends, sizes, frozen, words, gathered = run_cases(
        2,
        [
            bodies.cores_while_sharing,
            bodies.one_backend_each,
            bodies.too_large_then_small,
            bodies.only_one_froze,
            bodies.decided_differently,
            bodies.gather_when_off,
        ],
    )
    total = os.cpu_count()
    own = total // 2 if total > 1 else total
    may_choose = len(os.sched_getaffinity(0)) == total
    assert not may_choose or cores == [[total, own, own, own, total]] * 2
    for shm, trtllm, auto in backends:
        assert shm == auto == "fused: fits the fused workspace (shm)"
        assert trtllm.startswith("plain: no fused backend for this group (trtllm: ")
    for wide, narrow, wider, again in sizes:
        assert "rank 1 of the group (global rank 1): preflight failed: MemoryError" in wide
        assert narrow == wider == "fused: fits the fused workspace (shm)"
        assert "preflight failed: MemoryError" in again
    for (text,) in frozen:
        assert "opening a shared workspace" in text and "'frozen': True" in text and "'frozen': False" in text
    assert words == ["fused", "fused"] and gathered == [True, True]
