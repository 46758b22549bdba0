"""Ways in which ranks get out of step, or could: each must end in an error that says so, never in a wrong sum."""

import os
import time
from typing import Any

import paddle

from fastdeploy_fusion import AllReduceFusion, FusionConfig, groups
from fastdeploy_fusion.backends import shm_memory
from fastdeploy_fusion.config import ParallelConfig
from fastdeploy_fusion.layers.pipeline import PipelineStage
from fastdeploy_fusion.parallel import Parallel

ON = FusionConfig(enabled=True)


def _told(call: Any, *operands: Any) -> str:
    try:
        call(*operands)
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def interrupted(rank: int, num_ranks: int) -> list[str]:
    """Rank 1 is interrupted between two chunks and tries again: no row may be added up after that, on any rank."""
    world = groups.init_world()
    with AllReduceFusion.open(ON, group=world, hidden_size=4096) as fusion:
        x = paddle.arange(16, dtype="float32").reshape([16, 1]).expand([16, 4096]).contiguous() * (10.0**rank)
        if rank == 1:
            segment = fusion._backend._segment
            waits, real = iter((True,)), segment.await_others

            def interrupt(*signature: int) -> Any:
                if next(waits, False):
                    raise KeyboardInterrupt
                return real(*signature)

            segment.await_others = interrupt
        return [_told(fusion.all_reduce, x), _told(fusion.all_reduce, x)]


def interrupted_on_the_cpu_side(rank: int, num_ranks: int) -> list[str]:
    """Rank 1 is interrupted while it waits on the channel and goes on: it may not take the late answer for the next."""
    world = groups.init_world()
    plain = FusionConfig(enabled=True, backend="plain")
    with AllReduceFusion.open(plain, group=world, hidden_size=8) as fusion:
        if rank == 1:
            inbox = world.channel._inboxes[0]
            waits, real = iter((True,)), inbox.next_frame

            def interrupt() -> Any:
                if next(waits, False):
                    raise KeyboardInterrupt
                return real()

            inbox.next_frame = interrupt  # type: ignore[method-assign]
        return [_told(fusion.all_reduce, paddle.full([2, 8], 10.0**call)) for call in range(3)]


def a_forked_child_closes(rank: int, num_ranks: int) -> list[float]:
    """A child that closes its copy, as it does when it leaves a ``with``, has not left the group."""
    with AllReduceFusion.open(ON, hidden_size=8) as fusion:
        sums = [float(fusion.all_reduce(paddle.full([2, 8], 10.0**rank))[0, 0])]
        child = os.fork() if rank == 1 else 0
        if rank == 1 and child == 0:
            try:
                fusion.close()
            finally:
                os._exit(0)
        if child:
            os.waitpid(child, 0)
        fusion.group.barrier()
        return [*sums, float(fusion.all_reduce(paddle.full([2, 8], 10.0**rank))[0, 0])]


def different_dtypes(rank: int, num_ranks: int, backend: str) -> str:
    with AllReduceFusion.open(FusionConfig(enabled=True, backend=backend), hidden_size=8) as fusion:
        dtype = "bfloat16" if rank else "float32"
        x, weight = paddle.ones([2, 8]).astype(dtype), paddle.ones([8]).astype(dtype)
        return _told(fusion.add_rms_norm, x, x, weight, 1e-5)


def a_slow_stage(rank: int, num_ranks: int) -> list[str]:
    """The second stage waits for the first as long as FDFUSION_CALL_TIMEOUT_S says, and names it."""
    world = groups.init_world()
    layout = ParallelConfig(pipeline_parallel_size=2)
    with Parallel.open(layout, FusionConfig(), hidden_size=8) as parallel:
        stage = PipelineStage(parallel, 2)
        started, told = time.monotonic(), "sent"
        if rank == 0:
            stage.send(paddle.ones([2, 8]), paddle.ones([2, 8]))
            time.sleep(9)
        else:
            received = stage.receive([2, 8], "float32")
            assert float(received.sum()) == 32.0
            told = _told(stage.receive, [2, 8], "float32")
        return [told, f"{time.monotonic() - started:.1f}", str(world.size)]


def gather_of_unequal_columns(rank: int, num_ranks: int) -> str:
    with AllReduceFusion.open(ON, hidden_size=8) as fusion:
        return _told(fusion.all_gather, paddle.ones([4, 10 + 2 * rank]))


def second_user_disagrees(rank: int, num_ranks: int) -> list[Any]:
    """A second user of the workspace with another limit on one rank; the first goes on."""
    world = groups.init_world()
    with AllReduceFusion.open(ON, group=world, hidden_size=64) as first:
        second = FusionConfig(enabled=True, num_max_tokens=64 + rank)
        told = _told(lambda: AllReduceFusion.open(second, group=world, hidden_size=64))
        return [told, float(first.all_reduce(paddle.full([2, 64], 10.0**rank))[0, 0])]


def growth_fails(rank: int, num_ranks: int) -> list[Any]:
    """The larger workspace can't be made: its user gets the plain path with the reason, the others notice nothing."""
    world = groups.init_world()
    with AllReduceFusion.open(ON, group=world, hidden_size=64) as first:
        os.environ["FDFUSION_FAULT"] = "create:1:raise"
        with AllReduceFusion.open(ON, group=world, hidden_size=128) as second:
            os.environ["FDFUSION_FAULT"] = ""
            sums = [float(f.all_reduce(paddle.full([2, h], 10.0**rank))[0, 0]) for f, h in ((first, 64), (second, 128))]
            return [sums, str(first.explain([2, 64])), str(second.explain([2, 128]))]


def open_raises_then_works(rank: int, num_ranks: int) -> list[Any]:
    """An opening that ends in an error is no verdict: the next one starts anew."""
    world = groups.init_world()
    os.environ["FDFUSION_OPEN_TIMEOUT_S"] = "soon"
    told = _told(lambda: AllReduceFusion.open(ON, group=world, hidden_size=8))
    os.environ.pop("FDFUSION_OPEN_TIMEOUT_S")
    with AllReduceFusion.open(ON, group=world, hidden_size=8) as fusion:
        total = float(fusion.all_reduce(paddle.full([2, 8], 10.0**rank))[0, 0])
        return [told, total, str(fusion.explain([2, 8]))]


def strided_weight(rank: int, num_ranks: int) -> list[float]:
    """A weight that is a column of something larger, on both paths."""
    weight = paddle.arange(16, dtype="float32").reshape([8, 2])[:, 0]
    assert not weight.is_contiguous()
    errors = []
    for backend in ("shm", "plain"):
        with AllReduceFusion.open(FusionConfig(enabled=True, backend=backend), hidden_size=8) as fusion:
            norm, _ = fusion.add_rms_norm(paddle.ones([1, 8]), paddle.zeros([1, 8]), weight, 1e-6)
            errors.append(float((norm[0] - paddle.arange(0, 16, 2, dtype="float32")).abs().max()))
    return errors


def foreign_memory(rank: int, num_ranks: int) -> list[str]:
    """What is opened must be the memory of this run: its name, size and secret. Nothing is written to anything else."""
    me, start_time = os.getpid(), shm_memory.start_time_of(os.getpid())
    assert start_time is not None
    ours = shm_memory.make(8192, b"a" * 64)
    os.close(shm_memory.attach(me, start_time, ours, b"a" * 64, 8192))
    with open(__file__, "rb") as other:
        cases = [(ours, b"b" * 64, 8192), (ours, b"a" * 64, 4096), (other.fileno(), b"a" * 64, 8192)]
        told = [_told(shm_memory.attach, me, start_time, fd, token, size) for fd, token, size in cases]
    os.close(ours)
    return told
