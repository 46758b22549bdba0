"""Paddle CPU tensors seen as numpy arrays, and outputs for them, without copies and almost without cost.

``np.from_dlpack`` takes 7 us a tensor and ``paddle.from_dlpack`` 13, as much as a whole fused call of one token. An
array over the tensor's address takes 1, and 0.2 when that address was seen before: allocators hand out the same blocks
again and again. Such an array owns nothing and says nothing about who does; it is only valid while the tensor lives,
so it must not outlive the call that made it. The cache keeps descriptors of addresses, not memory.
"""

import ctypes
import mmap
import sys
from collections import deque
from typing import Any

import numpy as np
import paddle

_MAX_CACHED = 4096
_POOLED_FROM_BYTES = 256 << 10
_POOL_MAX_BYTES = 256 << 20
"""Of blocks of one size, in use or not: more are left to their tensors."""
_REFERENCES_OF_A_FREE_BLOCK = 2  # the local variable's, and the count's own argument
_CPU = paddle.CPUPlace()


class HostViews:
    """float32 CPU tensors -> arrays ``[rows, columns]`` over the same memory."""

    def __init__(self) -> None:
        self._arrays: dict[tuple[int, int, int], np.ndarray] = {}

    def of(self, tensor: Any, rows: int, columns: int) -> np.ndarray:
        """``tensor``: contiguous, float32, ``rows * columns`` elements."""
        key = (tensor.data_ptr(), rows, columns)
        array = self._arrays.get(key)
        if array is None:
            if len(self._arrays) >= _MAX_CACHED:
                self._arrays.clear()
            memory = (ctypes.c_float * (rows * columns)).from_address(key[0])
            array = self._arrays[key] = np.frombuffer(memory, np.float32).reshape(rows, columns)
        return array


class OutputPool:
    """Uninitialised float32 tensors ``[rows, columns]`` that the caller owns.

    Paddle's CPU allocator returns large blocks to the system, so that each new output pays its page faults again: 6 ms
    for 8 MB, twice the time of the fused call that fills it. Large outputs are therefore backed by blocks of this pool.
    A block is free when nothing but the pool refers to it, which is looked up when one is needed: Python code that ran
    when a tensor dies would meet Paddle's locks in the wrong order, and two threads would stop each other for good.
    """

    def __init__(self) -> None:
        self._blocks: dict[int, deque[np.ndarray]] = {}

    def empty(self, rows: int, columns: int) -> Any:
        num_bytes = 4 * rows * columns
        if num_bytes < _POOLED_FROM_BYTES:
            # paddle.empty at half its cost (3 us instead of 6): the call that it ends in.
            return paddle._C_ops.empty([rows, columns], paddle.float32, _CPU)
        block_bytes = 1 << (num_bytes - 1).bit_length()
        block, blocks = self._free_block(block_bytes), self._blocks[block_bytes]
        tensor = _from_dlpack(block[: rows * columns].reshape(rows, columns))  # refers to the block while it lives
        blocks.append(block)
        if len(blocks) * block_bytes > _POOL_MAX_BYTES:
            blocks.popleft()  # what still uses it keeps it
        return tensor

    def _free_block(self, block_bytes: int) -> np.ndarray:
        """A block that is in no list until it is put back, so that no other thread takes it."""
        blocks = self._blocks.setdefault(block_bytes, deque())
        for _ in range(len(blocks)):
            try:
                block = blocks.popleft()
            except IndexError:  # another thread took the last one
                break
            if sys.getrefcount(block) == _REFERENCES_OF_A_FREE_BLOCK:
                return block
            blocks.append(block)
        # Private: a forked child that writes into its outputs must not write into the parent's.
        memory = mmap.mmap(-1, block_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        return np.frombuffer(memory, np.float32)


def _from_dlpack(array: np.ndarray) -> Any:
    if hasattr(paddle, "from_dlpack"):
        return paddle.from_dlpack(array)
    return paddle.utils.dlpack.from_dlpack(array.__dlpack__())  # Paddle 2.6


outputs = OutputPool()
"""One pool a process: blocks are interchangeable among all users."""
