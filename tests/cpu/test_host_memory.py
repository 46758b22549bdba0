"""Outputs over pooled memory: each block has one user, and who forks or uses threads may not notice."""

import os
import subprocess
import sys

import paddle
import pytest

from fastdeploy_fusion.backends.host_memory import OutputPool

LARGE = (300, 256)  # enough for the pool


@pytest.fixture
def pool():
    return OutputPool()


def test_a_block_is_used_again_once_its_last_tensor_is_gone(pool):
    first = pool.empty(*LARGE)
    where = first.data_ptr()
    assert pool.empty(*LARGE).data_ptr() != where
    part = first[1:3]  # a view keeps the memory
    del first
    assert pool.empty(*LARGE).data_ptr() != where
    del part
    assert where in [pool.empty(*LARGE).data_ptr() for _ in range(2)]


def test_what_is_kept_stays_as_it_was(pool):
    kept = [pool.empty(*LARGE).fill_(float(i)) for i in range(700)]  # more than the pool holds on to
    for _ in range(50):
        pool.empty(*LARGE).fill_(-1.0)
    assert all(float(t.min()) == float(t.max()) == i for i, t in enumerate(kept))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_writes_into_memory_of_its_own(pool):
    tensor = pool.empty(*LARGE).fill_(1.0)
    del tensor
    tensor = pool.empty(*LARGE).fill_(1.0)
    child = os.fork()
    if child == 0:
        memory = (os.sys.modules["ctypes"].c_float * 4).from_address(tensor.data_ptr())
        memory[0] = -99.0
        os._exit(0)
    os.waitpid(child, 0)
    assert float(tensor[0, 0]) == 1.0


THREADS = """
import faulthandler, threading, time
import paddle
from fastdeploy_fusion.layers import RMSNorm
faulthandler.dump_traceback_later(30, exit=True)
stop, rounds = time.time() + 4, [0, 0]
def work(i):
    norm, x = RMSNorm(256, 1e-5, prefix="n"), paddle.full([300, 256], i + 1.0)
    while time.time() < stop:
        total = norm(x, x)[1]
        assert float(total[0, 0]) == float(total[-1, -1]) == 2.0 * (i + 1)
        rounds[i] += 1
threads = [threading.Thread(target=work, args=(i,), daemon=True) for i in range(2)]
for t in threads: t.start()
for t in threads: t.join()
assert min(rounds) > 20, rounds
"""


def test_two_threads_do_not_stop_each_other():
    """A finaliser that ran Python when a tensor died froze the process within seconds: locks in two orders."""
    done = subprocess.run([sys.executable, "-c", THREADS], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr[-2000:]


def test_small_outputs_are_paddles(pool):
    assert paddle.is_tensor(pool.empty(1, 8)) and not pool._blocks
