"""Memory that the ranks of a group share on one host, and the flags by which they hand chunks to each other.

The memory is an anonymous file (memfd) of the group's first rank, which the others open through ``/proc``: it has no
name in /dev/shm, is not bound to that mount's size, and the kernel frees it with its last user, also after SIGKILL.

A rank's chunk ``seq`` lies in half ``seq % 2`` of its slots. It writes the chunk, then sets its flag to ``seq``. When
all flags are at ``seq`` everybody has finished reading ``seq - 1``, so the half of ``seq + 1`` is free: one wait a
chunk is enough. That the flag is seen after the data relies on x86's store order (see ``refuse`` in shm.py).
"""

import mmap
import os
import time
from typing import Any

import numpy as np

from ..errors import PeerLost

LINE_BYTES = 64
TOKEN_BYTES = 64
"""At the segment's end, by which a rank knows that it has opened the memory of its own run."""
HALVES = 2
_LEFT = 1
"""Where in its line, after the flag, a rank says that it has closed the segment."""
_SPINS = 200
_POLITE_AFTER_S = 0.05
_CHECK_PEER_EVERY_S = 0.02


def header_bytes(world_size: int) -> int:
    """Flag lines, one cache line a rank, rounded up to a page."""
    return -(-world_size * LINE_BYTES // mmap.PAGESIZE) * mmap.PAGESIZE


def segment_bytes(world_size: int, chunk_bytes: int) -> int:
    """Bytes of the whole segment; each slot is a chunk with one line for its signature."""
    return header_bytes(world_size) + HALVES * world_size * (LINE_BYTES + chunk_bytes) + TOKEN_BYTES


def start_time_of(pid: int) -> int | None:
    """The kernel's start time of a live process; None if it is gone or a zombie. Tells a pid that was used again.

    Raises:
        OSError: it can't be told (no descriptor left, no /proc).
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in (b"Z", b"X") else int(fields[19])


class Segment:
    """This rank's mapping of the shared memory.

    Attributes:
        slots: ``[half][rank]`` -> float32 array over the chunk's bytes.
    """

    def __init__(self, fd: int, rank: int, peers: list[tuple[int, int]], chunk_bytes: int, timeout_s: float) -> None:
        """``peers``: (pid, start time) of each rank in order; ``timeout_s``: the longest wait for any of them."""
        world_size = len(peers)
        self.rank = rank
        self.others = [other for other in range(world_size) if other != rank]
        self.seq = 0
        self._peers = peers
        self.timeout_s = timeout_s
        self._map: mmap.mmap | None = mmap.mmap(fd, segment_bytes(world_size, chunk_bytes))
        self._bytes = memoryview(self._map)
        self._flags = self._bytes[: world_size * LINE_BYTES].cast("q")
        self._signatures: list[list[Any]] = []
        self.slots: list[list[np.ndarray]] = []
        start = header_bytes(world_size)
        slot_bytes = LINE_BYTES + chunk_bytes
        for half in range(HALVES):
            at = [start + (half * world_size + other) * slot_bytes for other in range(world_size)]
            self._signatures.append([self._bytes[a : a + LINE_BYTES].cast("q") for a in at])
            self.slots.append(
                [np.frombuffer(self._map, np.float32, chunk_bytes // 4, offset=a + LINE_BYTES) for a in at]
            )

    def publish(self, call: int, chunk: int) -> None:
        """Say that this rank's next chunk is in its slot: which call it belongs to, and which chunk of it it is."""
        seq = self.seq + 1
        signature = self._signatures[seq & 1][self.rank]
        signature[0] = call
        signature[1] = chunk
        self._flags[self.rank * 8] = seq
        self.seq = seq

    def await_others(self, call: int, chunk: int) -> tuple[int, int, int] | None:
        """Wait until all ranks have published the current chunk.

        Returns:
            None if all are at the same chunk of the same call, else (rank, call, chunk) of the first that is not.

        Raises:
            PeerLost: a rank died, or did not come in time.
        """
        seq, flags = self.seq, self._flags
        for other in self.others:
            if flags[other * 8] < seq:
                self._wait_for(other, seq)
        signatures = self._signatures[seq & 1]
        for other in self.others:
            theirs = signatures[other]
            if theirs[0] != call or theirs[1] != chunk:
                return other, theirs[0], theirs[1]
        return None

    def _wait_for(self, other: int, seq: int) -> None:
        flags, at = self._flags, other * 8
        for _ in range(_SPINS):
            if flags[at] >= seq:
                return
        started = time.monotonic()
        next_check = started + _CHECK_PEER_EVERY_S
        while flags[at] < seq:
            if flags[at + _LEFT] and flags[at] < seq:  # it may have published this chunk, then left
                raise PeerLost(f"rank {other} of the group has closed the workspace before chunk {seq}")
            # Yield: with more ranks than cores the late rank may need this one's core (1000x slower without).
            os.sched_yield()
            now = time.monotonic()
            if now < next_check:
                continue
            next_check = now + _CHECK_PEER_EVERY_S
            self._check(other, seq, now - started)
            if now - started > _POLITE_AFTER_S:
                time.sleep(0.0005)

    def _check(self, other: int, seq: int, waited_s: float) -> None:
        pid, start_time = self._peers[other]
        try:
            gone = start_time_of(pid) != start_time
        except OSError:
            gone = False  # not known; the time limit still holds
        if gone and self._flags[other * 8] < seq:
            raise PeerLost(f"rank {other} of the group (pid {pid}) died before its chunk {seq}")
        if waited_s > self.timeout_s:
            raise PeerLost(
                f"rank {other} of the group (pid {pid}) did not come to chunk {seq} within {self.timeout_s:g} s; it "
                f"is at chunk {self._flags[other * 8]}. FDFUSION_CALL_TIMEOUT_S sets the limit"
            )

    def close(self) -> None:
        """Unmap, and tell peers that still wait for this rank. They keep their own mappings."""
        if self._flags.nbytes and os.getpid() == self._peers[self.rank][0]:  # not a forked child's copy
            self._flags[self.rank * 8 + _LEFT] = 1
        self.slots = []
        self._signatures = []
        self._flags = memoryview(b"").cast("q")
        self._bytes = memoryview(b"")
        self._map = None  # unmapped with the last array over it: one may still be in use in a traceback
