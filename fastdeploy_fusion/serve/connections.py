"""Connections of the HTTP side: how many there may be, and how long one may take to send a request's head."""

import asyncio
import os
import resource
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

HEAD_S = 10.0
_BACKLOG = 2048
_OTHER_FILES = 64  # that the process may still open: cache files, shared memory, threads of libraries


class Connections:
    """Makes uvicorn's protocol objects, for ``limit`` connections at a time.

    uvicorn has neither limit: it answers 503 from some number on, and goes on accepting. Here one that is too many
    takes the place of the one that has owed a request's head for longest, so that idle ones never keep a client out.
    """

    def __init__(self, limit: int, head_s: float = HEAD_S) -> None:
        self.limit, self.head_s = limit, head_s
        self.open: set[_Connection] = set()
        self._owing: dict[_Connection, asyncio.TimerHandle] = {}  # the oldest first

    def make(self, **options: Any) -> "_Connection":
        """What uvicorn calls as ``http``."""
        return _Connection(self, **options)

    def close_all(self) -> None:
        """Whatever has not been sent."""
        for connection in list(self.open):
            connection.transport.abort()

    def admit(self, connection: "_Connection") -> None:
        self.open.add(connection)
        self.owes_head(connection)
        if len(self.open) > self.limit:
            self._drop(next(iter(self._owing)))

    def owes_head(self, connection: "_Connection") -> None:
        """From the first call on it has ``head_s``, however many bytes come."""
        if connection not in self._owing:
            self._owing[connection] = connection.loop.call_later(self.head_s, self._drop, connection)

    def has_head(self, connection: "_Connection") -> None:
        if (timer := self._owing.pop(connection, None)) is not None:
            timer.cancel()

    def forget(self, connection: "_Connection") -> None:
        self.open.discard(connection)
        self.has_head(connection)

    def _drop(self, connection: "_Connection") -> None:
        self.forget(connection)
        connection.transport.abort()


class _Connection(AutoHTTPProtocol):  # type: ignore[misc,valid-type]
    def __init__(self, ours: Connections, **options: Any) -> None:
        super().__init__(**options)
        self._ours = ours

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._ours.admit(self)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self not in self._ours.open:
            return
        if self.cycle is None or self.cycle.response_complete:
            self._ours.owes_head(self)
        else:
            self._ours.has_head(self)

    def connection_lost(self, error: Exception | None) -> None:
        self._ours.forget(self)
        super().connection_lost(error)


def room_for(wanted: int) -> tuple[int, int]:
    """``(connections, backlog)``, up to ``wanted`` connections, for which this process has file descriptors.

    asyncio accepts a whole backlog before it looks at any of it, and without a descriptor it complains once for each.
    The soft limit is raised as far as that needs and the hard one allows.
    """
    used = len(os.listdir("/proc/self/fd")) + _OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = used + wanted + _BACKLOG
    if soft != resource.RLIM_INFINITY and soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return share(wanted, needed - used if soft == resource.RLIM_INFINITY else soft - used)


def share(wanted: int, descriptors: int) -> tuple[int, int]:
    """``(connections, backlog)`` that so many descriptors are enough for."""
    backlog = max(1, min(_BACKLOG, descriptors // 4))
    return max(1, min(wanted, descriptors - backlog)), backlog
