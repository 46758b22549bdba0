"""The fused path on CPUs: ranks on one host sum, add and normalise chunk by chunk through shared memory.

A call streams its rows in chunks that fit a core's cache: copy the own chunk into the slot, wait for the others', add
in rank order (the same bits on every rank, whatever the batch), add the residual, normalise. Any number of tokens goes
through the same few hundred kilobytes.
"""

import os
import platform
from typing import Any

import numpy as np
import paddle

from ..errors import FusionError, PeerLost
from ..groups import RankGroup
from . import WorkspacePlan
from .host_memory import HostViews, outputs
from .host_norm import normalise_rows
from .shm_segment import Segment, segment_bytes, start_time_of

CHUNK_BYTES = 128 << 10
"""One rank's rows of one chunk: with residual and result they stay in a core's second-level cache."""
_NUM_MAX_TOKENS = 1 << 30
_OPS = {1: "add_rms_norm", 2: "all_reduce", 3: "all_gather"}
_ADD_RMS_NORM, _ALL_REDUCE, _ALL_GATHER = _OPS


def probe(device: str) -> dict[str, Any]:
    """Facts of this rank: its host (boot id), processor, pid."""
    refusal = None
    if device != "cpu":
        refusal = f"shared memory serves CPU tensors, and the device is {device}"
    elif platform.machine() not in ("x86_64", "AMD64"):
        refusal = f"shared-memory flags rely on x86 store order, and this is {platform.machine()}"
    elif not hasattr(os, "memfd_create") or start_time_of(os.getpid()) is None:
        refusal = "shared memory needs Linux with memfd and /proc"
    return {"refusal": refusal, "host": _host_id(), "pid": os.getpid(), "start_time": start_time_of(os.getpid())}


def _host_id() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return platform.node()


def refuse(facts: list[dict[str, Any]], plan: WorkspacePlan) -> str | None:
    for rank, fact in enumerate(facts):
        if fact["refusal"] is not None:
            return f"rank {rank}: {fact['refusal']}"
        if fact["host"] != facts[0]["host"]:
            return f"rank {rank} is on another host than rank 0; shared memory serves one host"
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
    fd = _make(workspace_bytes(plan)) if group.rank == 0 else -1
    try:
        me = [os.getpid(), start_time_of(os.getpid()), fd]
        peers = group.all_gather_object(me, "shared memory")
        if group.rank != 0:
            pid, _, first_fd = peers[0]
            fd = os.open(f"/proc/{pid}/fd/{first_fd}", os.O_RDWR)
        alive = [(pid, start_time) for pid, start_time, _ in peers]
        segment = Segment(fd, group.rank, alive, _chunk_bytes(plan), group.timeout_s)
        group.all_gather_object(None, "shared memory mapped")  # the first rank's descriptor must live until here
    finally:
        if fd >= 0:
            os.close(fd)
    return ShmBackend(segment, plan, group)


def _make(num_bytes: int) -> int:
    fd = os.memfd_create("fastdeploy_fusion", os.MFD_CLOEXEC)
    try:
        os.posix_fallocate(fd, 0, num_bytes)  # memory that is short shows here, not as SIGBUS in a call
    except OSError:
        os.close(fd)
        raise
    return fd


class ShmBackend:
    """See ``Backend``. Deterministic: addition is in rank order, and a row's result does not depend on the others."""

    name = "shm"
    deterministic = True

    def __init__(self, segment: Segment, plan: WorkspacePlan, group: RankGroup) -> None:
        self._segment: Segment | None = segment
        self._group = group
        self._rank = group.rank
        self._world_size = plan.world_size
        self._hidden_size = plan.hidden_size
        self._chunk_rows = chunk_rows(plan.hidden_size)
        self._chunk_size = _chunk_bytes(plan) // 4
        self._views = HostViews()
        self._broken: str | None = None

    @property
    def timeout_s(self) -> float:
        return self._segment.timeout_s if self._segment is not None else 0.0

    @timeout_s.setter
    def timeout_s(self, seconds: float) -> None:
        if self._segment is not None:
            self._segment.timeout_s = seconds

    def add_rms_norm(self, partial: Any, residual: Any, weight: Any, eps: float) -> tuple[Any, Any]:
        if partial.dtype != paddle.float32:
            x, r, w = (operand.astype("float32") for operand in (partial, residual, weight))
            norm, total = self.add_rms_norm(x, r, w, eps)
            return norm.astype(partial.dtype), total.astype(partial.dtype)
        num_tokens, hidden_size = partial.shape
        residual_out, norm_out = outputs.empty(num_tokens, hidden_size), outputs.empty(num_tokens, hidden_size)
        views = self._views.of
        x, sums = views(partial, num_tokens, hidden_size), views(residual_out, num_tokens, hidden_size)
        residual_rows, norms = views(residual, num_tokens, hidden_size), views(norm_out, num_tokens, hidden_size)
        scales = views(weight, 1, hidden_size)
        for start in range(0, num_tokens, self._chunk_rows):
            rows = slice(start, start + self._chunk_rows)
            total = sums[rows]
            self._sum_chunk(_ADD_RMS_NORM, num_tokens, x[rows], total)
            total += residual_rows[rows]
            normalise_rows(total, scales, eps, norms[rows])
        return norm_out, residual_out

    def all_reduce(self, partial: Any) -> Any:
        if partial.dtype != paddle.float32:
            return self.all_reduce(partial.astype("float32")).astype(partial.dtype)
        num_tokens, hidden_size = partial.shape
        out = outputs.empty(num_tokens, hidden_size)
        x, sums = self._views.of(partial, num_tokens, hidden_size), self._views.of(out, num_tokens, hidden_size)
        for start in range(0, num_tokens, self._chunk_rows):
            rows = slice(start, start + self._chunk_rows)
            self._sum_chunk(_ALL_REDUCE, num_tokens, x[rows], sums[rows])
        return out

    def all_gather(self, part: Any) -> Any:
        """All ranks' ``[num_tokens, columns]`` (float32, contiguous) side by side, in rank order."""
        num_tokens, columns = part.shape
        size = num_tokens * columns
        flat = self._views.of(part, 1, size)[0]
        gathered = np.empty((self._world_size, size), np.float32)
        for start in range(0, size, self._chunk_size):
            span = slice(start, start + self._chunk_size)
            for rank, other in enumerate(self._exchange(_ALL_GATHER, num_tokens, flat[span])):
                gathered[rank, span] = other
        out = outputs.empty(num_tokens, self._world_size * columns)
        rows = self._views.of(out, num_tokens, self._world_size * columns)
        rows.reshape(num_tokens, self._world_size, columns)[:] = gathered.reshape(-1, num_tokens, columns).swapaxes(
            0, 1
        )
        return out

    def _sum_chunk(self, op: int, num_tokens: int, own: np.ndarray, total: np.ndarray) -> None:
        """``total`` = the sum of all ranks' rows, in rank order."""
        parts = [part.reshape(own.shape) for part in self._exchange(op, num_tokens, own.ravel())]
        np.add(parts[0], parts[1], out=total)
        for part in parts[2:]:
            total += part

    def _exchange(self, op: int, num_tokens: int, own: np.ndarray) -> list[np.ndarray]:
        """All ranks' chunks; the others' are valid until the next exchange."""
        segment = self._segment
        if segment is None or self._broken is not None:
            raise FusionError(self._broken or "this workspace is closed")
        size = own.size
        slots = segment.slots[(segment.seq + 1) & 1]
        slots[self._rank][:size] = own
        signature = op << 32 | num_tokens
        segment.publish(signature)
        try:
            stranger = segment.await_others(signature)
        except PeerLost as error:
            self._broken = str(error)
            raise
        if stranger is not None:
            self._refuse(op, num_tokens, *stranger)
        return [own if rank == self._rank else slot[:size] for rank, slot in enumerate(slots)]

    def _refuse(self, op: int, num_tokens: int, rank: int, signature: int) -> None:
        other = f"{_OPS.get(signature >> 32, 'an unknown call')} of {signature & 0xFFFFFFFF} tokens"
        names = self._group.channel.name_of
        self._broken = (
            f"{names(self._rank)} is in {_OPS[op]} of {num_tokens} tokens and {names(rank)} in {other}; "
            "all ranks of a group must make the same calls with equal shapes"
        )
        raise FusionError(self._broken)

    def close(self) -> None:
        if self._segment is not None:
            self._segment.close()
            self._segment = None
