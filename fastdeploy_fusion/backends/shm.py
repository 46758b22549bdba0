"""The fused path on CPUs: ranks on one host sum, add and normalise chunk by chunk through shared memory.

A call streams its rows in chunks that fit a core's cache: copy the own chunk into the slot, wait for the others', add
in rank order (the same bits on every rank, whatever the batch). After some chunks it adds the residual and normalises.
Any number of tokens goes through the same few hundred kilobytes.
"""

import functools
import os
import platform
import secrets
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import paddle

from ..config import DTYPES
from ..errors import FusionError
from ..groups import RankGroup
from ..host_values import DTYPE_NAMES
from . import WorkspacePlan, cores, shm_memory
from .host_memory import HostViews, outputs
from .host_norm import normalise_rows
from .shm_segment import TOKEN_BYTES, Segment, segment_bytes, start_time_of

T = TypeVar("T")
CHUNK_BYTES = 128 << 10
"""One rank's rows of one chunk: with residual and result they stay in a core's second-level cache."""
NUM_MAX_TOKENS = 1 << 20
"""No limit in practice: it was ahead of gloo at every count that was measured, up to 16384 (docs/tuning.md)."""

_CHUNKS_PER_NORM = 8
"""Peers wait while a rank normalises, and a small norm is mostly numpy's own time: one after each chunk made calls of
several chunks 15 to 40% slower."""

_OPS = {1: "add_rms_norm", 2: "all_reduce", 3: "all_gather"}
_ADD_RMS_NORM, _ALL_REDUCE, _ALL_GATHER = _OPS
_DTYPES = list(DTYPE_NAMES)


def probe(device: str) -> dict[str, Any]:
    """Facts of this rank: its host (boot id), processor, pid."""
    refusal = None
    if device != "cpu":
        refusal = f"shared memory serves CPU tensors, and the device is {device}"
    elif platform.machine() not in ("x86_64", "AMD64"):
        refusal = f"shared-memory flags rely on x86 store order, and this is {platform.machine()}"
    elif not hasattr(os, "memfd_create") or not os.path.exists("/proc/self/stat"):
        refusal = "shared memory needs Linux with memfd and /proc"
    return {"refusal": refusal, "host": _host_id(), "pid": os.getpid()}


def _host_id() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            # Ranks find each other's memory by pid, so containers with pids of their own are hosts of their own.
            return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return platform.node()


def refuse(facts: list[dict[str, Any]], plan: WorkspacePlan) -> str | None:
    for rank, fact in enumerate(facts):
        if fact["refusal"] is not None:
            return f"rank {rank}: {fact['refusal']}"
        if fact["host"] != facts[0]["host"]:
            return f"rank {rank} is on another host (or in another container) than rank 0; shared memory serves one"
    return None


def chunk_rows(hidden_size: int) -> int:
    return max(1, CHUNK_BYTES // (4 * hidden_size))


def _chunk_bytes(plan: WorkspacePlan) -> int:
    return 4 * plan.hidden_size * chunk_rows(plan.hidden_size)


def workspace_bytes(plan: WorkspacePlan) -> int:
    """The segment's bytes; one segment serves all ranks of the group."""
    return segment_bytes(plan.world_size, _chunk_bytes(plan))


def preflight(plan: WorkspacePlan) -> None:
    needed = workspace_bytes(plan)
    available = available_bytes()
    if needed > available:
        raise MemoryError(f"shared memory needs {needed} bytes and the machine has {available} available")


def available_bytes() -> int:
    """What the kernel could give without swapping."""
    with open("/proc/meminfo") as file:
        kilobytes = next(line.split()[1] for line in file if line.startswith("MemAvailable:"))
    return int(kilobytes) << 10


def create(group: RankGroup, plan: WorkspacePlan) -> "ShmBackend":
    """The first rank makes the memory, the others map it. Collective."""
    num_bytes = workspace_bytes(plan)
    token = secrets.token_bytes(TOKEN_BYTES) if group.rank == 0 else b""
    fd = shm_memory.make(num_bytes, token) if group.rank == 0 else -1
    try:
        peers = group.all_gather_object([os.getpid(), start_time_of(os.getpid()), fd, token], "shared memory")
        if group.rank != 0:
            pid, start_time, first_fd, token = peers[0]
            fd = shm_memory.attach(pid, start_time, first_fd, token, num_bytes)
        alive = [(pid, start_time) for pid, start_time, *_ in peers]
        segment = Segment(fd, group.rank, alive, _chunk_bytes(plan), group.timeout_s)
        group.all_gather_object(None, "shared memory mapped")  # the first rank's descriptor must live until here
    finally:
        if fd >= 0:
            os.close(fd)
    return ShmBackend(segment, plan, group)


def _sign(op: int, num_tokens: int, columns: int, dtype: Any) -> int:
    """A call in one 64-bit number, by which ranks see that they are in the same one."""
    return (op | _DTYPES.index(dtype) << 2) << 56 | columns << 32 | num_tokens


def _describe(call: int, chunk: int) -> str:
    kind, columns, num_tokens = call >> 56, call >> 32 & 0xFFFFFF, call & 0xFFFFFFFF
    if kind & 3 not in _OPS or kind >> 2 >= len(DTYPES):
        return f"an unknown call, chunk {chunk}"
    return f"{_OPS[kind & 3]} of {num_tokens} tokens x {columns} {DTYPES[kind >> 2]}, chunk {chunk}"


def _in_step(method: Callable[..., T]) -> Callable[..., T]:
    """A call that is left half done puts the ranks out of step, whatever ended it: nothing may be added up after it."""

    @functools.wraps(method)
    def run(self: "ShmBackend", *operands: Any) -> T:
        try:
            return method(self, *operands)
        except BaseException as error:
            own = isinstance(error, FusionError)
            text = str(error) if own else f"a call was interrupted ({type(error).__name__}): the ranks are out of step"
            self._broken = self._broken or text
            raise

    return run


class ShmBackend:
    """See ``Backend``. Deterministic: addition is in rank order, and a row's result does not depend on the others."""

    name = "shm"
    deterministic = True
    takes_weight_bias = True

    def __init__(self, segment: Segment, plan: WorkspacePlan, group: RankGroup) -> None:
        self._segment: Segment | None = segment
        self._group = group
        self._rank = group.rank
        self._world_size = plan.world_size
        self._chunk_rows = chunk_rows(plan.hidden_size)
        self._chunk_size = _chunk_bytes(plan) // 4
        self._views = HostViews()
        self._broken: str | None = None
        cores.claim()

    @property
    def timeout_s(self) -> float:
        return self._segment.timeout_s if self._segment is not None else 0.0

    @timeout_s.setter
    def timeout_s(self, seconds: float) -> None:
        if self._segment is not None:
            self._segment.timeout_s = seconds

    @_in_step
    def add_rms_norm(
        self, partial: Any, residual: Any, weight: Any, eps: float, weight_bias: float = 0.0
    ) -> tuple[Any, Any]:
        dtype = partial.dtype
        if dtype != paddle.float32:
            partial, residual, weight = (operand.astype("float32") for operand in (partial, residual, weight))
        num_tokens, hidden_size = partial.shape
        residual_out, norm_out = outputs.empty(num_tokens, hidden_size), outputs.empty(num_tokens, hidden_size)
        views = self._views.of
        x, sums = views(partial, num_tokens, hidden_size), views(residual_out, num_tokens, hidden_size)
        residual_rows, norms = views(residual, num_tokens, hidden_size), views(norm_out, num_tokens, hidden_size)
        scales = views(weight, 1, hidden_size)
        if weight_bias:
            scales = scales + np.float32(weight_bias)
        call = _sign(_ADD_RMS_NORM, num_tokens, hidden_size, dtype)
        summed = self._chunk_rows * _CHUNKS_PER_NORM
        for first in range(0, num_tokens, summed):
            last = min(first + summed, num_tokens)
            for start in range(first, last, self._chunk_rows):
                rows = slice(start, start + self._chunk_rows)
                self._sum_chunk(call, start, x[rows], sums[rows])
            rows = slice(first, last)
            total = sums[rows]
            total += residual_rows[rows]
            normalise_rows(total, scales, eps, norms[rows])
        if dtype != paddle.float32:
            return norm_out.astype(dtype), residual_out.astype(dtype)
        return norm_out, residual_out

    @_in_step
    def all_reduce(self, partial: Any) -> Any:
        dtype = partial.dtype
        if dtype != paddle.float32:
            partial = partial.astype("float32")
        num_tokens, hidden_size = partial.shape
        out = outputs.empty(num_tokens, hidden_size)
        x, sums = self._views.of(partial, num_tokens, hidden_size), self._views.of(out, num_tokens, hidden_size)
        call = _sign(_ALL_REDUCE, num_tokens, hidden_size, dtype)
        for start in range(0, num_tokens, self._chunk_rows):
            rows = slice(start, start + self._chunk_rows)
            self._sum_chunk(call, start, x[rows], sums[rows])
        return out if dtype == paddle.float32 else out.astype(dtype)

    @_in_step
    def all_gather(self, part: Any) -> Any:
        """All ranks' ``[num_tokens, columns]`` (float32, contiguous) side by side, in rank order."""
        num_tokens, columns = part.shape
        size = num_tokens * columns
        flat = self._views.of(part, 1, size)[0]
        gathered = np.empty((self._world_size, size), np.float32)
        call = _sign(_ALL_GATHER, num_tokens, columns, part.dtype)
        for start in range(0, size, self._chunk_size):
            span = slice(start, start + self._chunk_size)
            for rank, other in enumerate(self._exchange(call, start, flat[span])):
                gathered[rank, span] = other
        out = outputs.empty(num_tokens, self._world_size * columns)
        rows = self._views.of(out, num_tokens, self._world_size * columns)
        by_rank = gathered.reshape(self._world_size, num_tokens, columns)
        rows.reshape(num_tokens, self._world_size, columns)[:] = by_rank.swapaxes(0, 1)
        return out

    def _sum_chunk(self, call: int, chunk: int, own: np.ndarray, total: np.ndarray) -> None:
        """``total`` = the sum of all ranks' rows, in rank order."""
        parts = [part.reshape(own.shape) for part in self._exchange(call, chunk, own.ravel())]
        np.add(parts[0], parts[1], out=total)
        for part in parts[2:]:
            total += part

    def _exchange(self, call: int, chunk: int, own: np.ndarray) -> list[np.ndarray]:
        """All ranks' chunks; the others' are valid until the next exchange."""
        segment = self._segment
        if segment is None or self._broken is not None:
            raise FusionError(self._broken or "this workspace is closed")
        size = own.size
        slots = segment.slots[(segment.seq + 1) & 1]
        slots[self._rank][:size] = own
        segment.publish(call, chunk)
        stranger = segment.await_others(call, chunk)
        if stranger is not None:
            rank, *theirs = stranger
            names = self._group.channel.name_of
            raise FusionError(
                f"{names(self._rank)} is in {_describe(call, chunk)} and {names(rank)} in {_describe(*theirs)}; all "
                "ranks of a group must make the same calls with equal shapes"
            )
        return [own if rank == self._rank else slot[:size] for rank, slot in enumerate(slots)]

    def close(self) -> None:
        if self._segment is not None:
            self._segment.close()
            self._segment = None
            self._group.close()
            cores.give_back()
