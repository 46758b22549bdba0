"""The communicator that FlashInfer gets, over a group of threads."""

import ctypes
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from fastdeploy_fusion.backends.flashinfer.comm import Communicator, PeerFailed, distributed_by


class ThreadGroup:
    """What the communicator uses of a RankGroup, for threads of one process."""

    def __init__(self, size):
        self.size, self.local = size, threading.local()
        self.slots, self.barrier = [None] * size, threading.Barrier(size, timeout=10)

    @property
    def rank(self):
        return self.local.rank

    def all_gather_object(self, value, what=""):
        assert value is None or isinstance(value, (list, str, int, bytes))
        self.slots[self.rank] = value
        self.barrier.wait()
        found = list(self.slots)
        self.barrier.wait()
        return found

    def run(self, body):
        def start(rank):
            self.local.rank = rank
            return body(Communicator(self))

        with ThreadPoolExecutor(self.size) as pool:
            return list(pool.map(start, range(self.size)))


def test_gather_and_broadcast():
    def body(comm):
        rank = comm.Get_rank()
        comm.barrier()
        return comm.allgather(b"h%d" % rank), comm.allgather(bytearray(b"x")), comm.bcast(rank * 10, root=2)

    assert ThreadGroup(3).run(body) == [((b"h0", b"h1", b"h2"), (b"x", b"x", b"x"), 20)] * 3


def test_split_by_color_in_the_order_of_keys():
    def body(comm):
        rank = comm.Get_rank()
        part = comm.Split(rank % 2, -rank)
        return part.Get_rank(), part.Get_size(), part.allgather(rank), part.bcast(rank, root=0)

    assert ThreadGroup(4).run(body) == [(1, 2, (2, 0), 2), (1, 2, (3, 1), 3), (0, 2, (2, 0), 2), (0, 2, (3, 1), 3)]


def test_a_failure_reaches_the_peers_in_place_of_the_next_exchange():
    def body(comm):
        comm.barrier()
        if comm.Get_rank() == 1:
            comm.fail("out of memory")
            return "failed"
        with pytest.raises(PeerFailed, match="rank 1: out of memory"):
            comm.allgather("handle")
        return "told"

    assert ThreadGroup(3).run(body) == ["told", "failed", "told"]


class Handle(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_byte * 8),)


def test_older_workspace_code_gets_a_stand_in_for_torch_distributed():
    """CUDA IPC handles cross as bytes; the module's own `dist` is back afterwards, whatever happened."""
    module = SimpleNamespace(dist="torch.distributed")

    def body(comm):
        rank = comm.Get_rank()
        mine = SimpleNamespace(dist="torch.distributed")
        with distributed_by(comm, [mine, SimpleNamespace()]) as group:
            handles = [None, None]
            mine.dist.all_gather_object(handles, Handle((ctypes.c_byte * 8)(*[rank + 1] * 8)), group=group)
            mine.dist.barrier(group=group)
            assert (mine.dist.get_rank(group), mine.dist.get_world_size(group=group)) == (rank, 2)
        assert mine.dist == "torch.distributed"
        return [list(handle.internal) for handle in handles]

    assert ThreadGroup(2).run(body) == [[[1] * 8, [2] * 8]] * 2
    with pytest.raises(ZeroDivisionError), distributed_by(None, [module]):
        raise ZeroDivisionError
    assert module.dist == "torch.distributed"
