"""What each rank does in the tests of how workspaces are shared, grown and refused."""

import contextlib
import os
from typing import Any
from unittest import mock

import paddle

from fastdeploy_fusion import AllReduceFusion, FusionConfig, groups
from fastdeploy_fusion.backends import shm

ON = FusionConfig(enabled=True)


def cores_while_sharing(rank: int, num_ranks: int) -> list[int]:
    """How many cores the main thread may run on: before, with one user, grown by a second, with one left, after."""
    count = lambda: len(os.sched_getaffinity(0))  # noqa: E731
    world = groups.init_world()
    seen = [count()]
    first = AllReduceFusion.open(ON, group=world, hidden_size=8)
    seen.append(count())
    second = AllReduceFusion.open(ON, group=world, hidden_size=64)
    seen.append(count())
    first.close()
    seen.append(count())
    second.close()
    return [*seen, count()]


def one_backend_each(rank: int, num_ranks: int) -> list[str]:
    """A second user that asks for another backend gets that one, or its refusal, not the first user's."""
    world = groups.init_world()
    with contextlib.ExitStack() as stack:
        paths = []
        for backend in ("shm", "trtllm", "auto"):
            config = FusionConfig(enabled=True, backend=backend)
            fusion = stack.enter_context(AllReduceFusion.open(config, group=world, hidden_size=8))
            assert float(fusion.all_reduce(paddle.full([1, 8], 10.0**rank))[0, 0]) == 11.0
            paths.append(str(fusion.explain([1, 8])))
    return paths


def too_large_then_small(rank: int, num_ranks: int) -> list[str]:
    """Rank 1 has no room for wide rows; narrow ones go, also while the refused user lives, and wide ones never do."""
    world = groups.init_world()
    bytes_there = 1 << 20 if rank == 1 else 1 << 40
    decisions = []
    with mock.patch.object(shm, "available_bytes", lambda: bytes_there), contextlib.ExitStack() as stack:
        for hidden_size in (1 << 20, 8, 16, 1 << 20):
            fusion = stack.enter_context(AllReduceFusion.open(ON, group=world, hidden_size=hidden_size))
            assert float(fusion.all_reduce(paddle.full([1, hidden_size], 10.0**rank))[0, -1]) == 11.0
            decisions.append(str(fusion.explain([1, hidden_size])))
    return decisions


def only_one_froze(rank: int, num_ranks: int) -> list[str]:
    """What both are told when a second user comes and only rank 0 has called ``freeze``."""
    world = groups.init_world()
    with AllReduceFusion.open(ON, group=world, hidden_size=8) as fusion:
        if rank == 0:
            fusion.freeze()
        try:
            AllReduceFusion.open(ON, group=world, hidden_size=16)
        except Exception as error:
            return [f"{type(error).__name__}: {error}"]
    return ["no error"]


def decided_differently(rank: int, num_ranks: int) -> Any:
    """The words for what switched fusion on are each rank's own."""
    with AllReduceFusion.open(FusionConfig(enabled=True, decided_by=f"flag {rank}"), hidden_size=8) as fusion:
        return fusion.explain([1, 8]).path.value


def gather_when_off(rank: int, num_ranks: int) -> bool:
    """Columns are gathered while fusion is off, too, and the shared memory is left alone then."""
    with AllReduceFusion.open(ON, hidden_size=8) as fusion:
        own = paddle.full([1, 2], float(rank))
        with mock.patch.object(shm.ShmBackend, "_exchange", side_effect=AssertionError("used")):
            fusion.set_enabled(False)
            gathered = fusion.all_gather(own)
        return bool((gathered == paddle.to_tensor([[0.0, 0.0, 1.0, 1.0]])).all())
