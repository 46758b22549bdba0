"""What FlashInfer wants of a communicator, spoken over the group's own CPU-side channel.

No torch process group is needed or made, the group is exactly ours, and every rank is an in-group rank.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator, Sequence
from typing import Any

from ...errors import PeerLost


class PeerFailed(PeerLost):
    """Another rank failed while the workspace was being made; the message has the rank and its reason."""


class Communicator:
    """FlashInfer's `CommBackend`, under its names: rank, size, allgather, bcast, barrier, Split over a RankGroup.

    `members` are the in-group ranks that belong, in the order of their new ranks: all of them, or one color of a Split.
    All exchanges are collective over the whole RankGroup, so that the parts of a Split exchange in step. A rank that
    fails between two exchanges says so by `fail()`, in place of the next one: its peers get PeerFailed there.
    """

    def __init__(self, group: Any, members: Sequence[int] | None = None) -> None:
        self._group = group
        self._members = tuple(range(group.size)) if members is None else tuple(members)

    def Get_rank(self) -> int:
        return self._members.index(self._group.rank)

    def Get_size(self) -> int:
        return len(self._members)

    def _exchange(self, reason: str, data: Any) -> list[Any]:
        answers = self._group.all_gather_object([reason, data], "FlashInfer's workspace")
        for rank, (failure, _) in enumerate(answers):
            if failure and not reason:
                raise PeerFailed(f"rank {rank}: {failure}")
        return [value for _, value in answers]

    def fail(self, reason: str) -> None:
        """Tell the peers, who wait in an exchange or will come to one. Not after PeerFailed: they know."""
        self._exchange(reason or "failed", None)

    def allgather(self, data: Any) -> tuple[Any, ...]:
        values = self._exchange("", _plain(data))
        return tuple(values[member] for member in self._members)

    def bcast(self, data: Any, root: int) -> Any:
        # Gathered rather than broadcast: each part of a Split has its own root.
        return self.allgather(data if self.Get_rank() == root else None)[root]

    def barrier(self) -> None:
        self._exchange("", None)

    def close(self) -> None:
        """Hang up. Not collective."""
        self._group.close()

    def Split(self, color: int, key: int) -> Communicator:
        mine = self._exchange("", [color, key])
        chosen = [member for member in self._members if mine[member][0] == color]
        return Communicator(self._group, sorted(chosen, key=lambda member: (mine[member][1], member)))


def _plain(data: Any) -> Any:
    """FlashInfer's handles as what the channel carries: JSON values and bytes."""
    if isinstance(data, (bytearray, memoryview)):
        return bytes(data)
    return data


class _Distributed:
    """Stands for `torch.distributed` inside FlashInfer's older workspace code, which takes no communicator."""

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator

    def get_rank(self, group: Any = None) -> int:
        return self._communicator.Get_rank()

    def get_world_size(self, group: Any = None) -> int:
        return self._communicator.Get_size()

    def barrier(self, group: Any = None) -> None:
        self._communicator.barrier()

    def all_gather_object(self, out: list[Any], value: Any, group: Any = None) -> None:
        """CUDA IPC handles are ctypes structures: they cross as their bytes."""
        if not isinstance(value, ctypes.Structure):
            out[:] = self._communicator.allgather(value)
            return
        kind = type(value)
        out[:] = [kind.from_buffer_copy(raw) for raw in self._communicator.allgather(bytes(value))]


@contextlib.contextmanager
def distributed_by(communicator: Communicator, modules: Sequence[Any]) -> Iterator[_Distributed]:
    """Inside, the `dist` of these FlashInfer modules is the communicator. Yields what to pass as `group`."""
    stand_in = _Distributed(communicator)
    before = [(module, module.dist) for module in modules if hasattr(module, "dist")]
    for module, _ in before:
        module.dist = stand_in
    try:
        yield stand_in
    finally:
        for module, dist in before:
            module.dist = dist
