"""The CPU-side channel of a group: small objects between its ranks, with deadlines, and lost ranks named.

A star of sockets around the group's first rank. It carries facts, votes and handles at start-up, and works the same
beside NCCL and gloo. JSON is spoken, never pickle: nothing received is executed. Bytes travel as base64.
"""

import base64
import json
import os
import selectors
import socket
import struct
import time
from collections.abc import Callable
from typing import Any

from .errors import PeerLost

_HEADER = struct.Struct("<Q")
_GRACE_S = 2.0
"""A member waits this much longer than the first rank, whose message can say who was late."""
_NOTICE_S = 0.5
"""After this long the first rank tells those who came that it is waiting for others: they then count from there."""


class Rendezvous:
    """What a channel needs to be set up: one text, published by the first rank and looked up by the others within so
    many seconds. Each channel has its own."""

    def __init__(self, publish: Callable[[str], None], look_up: Callable[[float], str]) -> None:
        self.publish = publish
        self.look_up = look_up


def _pack(value: Any) -> bytes:
    body = json.dumps(value, default=_encode).encode()
    return _HEADER.pack(len(body)) + body


def _encode(value: Any) -> Any:
    if isinstance(value, bytes):
        return {"__bytes__": base64.b64encode(value).decode()}
    raise TypeError(f"a channel carries JSON values and bytes, not {type(value).__name__}")


def _decode(pairs: dict[str, Any]) -> Any:
    return base64.b64decode(pairs["__bytes__"]) if set(pairs) == {"__bytes__"} else pairs


class _Inbox:
    """Frames from one socket."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._buffer = bytearray()

    def read_available(self) -> bool:
        """Read what is there; False when the other end is gone."""
        try:
            data = self.sock.recv(1 << 20)
        except (ConnectionError, OSError):
            return False
        self._buffer += data
        return bool(data)

    def next_frame(self) -> Any:
        """The next whole frame, or None."""
        if len(self._buffer) < _HEADER.size:
            return None
        (length,) = _HEADER.unpack_from(self._buffer)
        end = _HEADER.size + length
        if len(self._buffer) < end:
            return None
        body = bytes(self._buffer[_HEADER.size : end])
        del self._buffer[:end]
        return json.loads(body, object_hook=_decode)


def _wait(inboxes: dict[int, _Inbox], deadline: float) -> tuple[dict[int, Any], list[int], list[int]]:
    """One frame from each inbox: (frames, dead, late). Returns at the first death: the others can't go on either."""
    frames: dict[int, Any] = {}
    with selectors.DefaultSelector() as selector:
        for rank, inbox in inboxes.items():
            frame = inbox.next_frame()
            if frame is not None:
                frames[rank] = frame
            else:
                selector.register(inbox.sock, selectors.EVENT_READ, rank)
        while selector.get_map():
            events = selector.select(max(0.0, deadline - time.monotonic()))
            if not events:
                return frames, [], sorted(set(inboxes) - set(frames))
            for key, _ in events:
                rank = key.data
                if not inboxes[rank].read_available():
                    return frames, [rank], []
                frame = inboxes[rank].next_frame()
                if frame is not None:
                    frames[rank] = frame
                    selector.unregister(key.fileobj)
    return frames, [], []


class Channel:
    """Exchanges between the ``size`` ranks of one group; ``rank`` and all ranks named in errors are in-group ranks.

    Not for use by several threads at once. After an error the channel is broken, and every later call raises it anew:
    ranks that lost step can't be trusted to be in the same exchange again.
    """

    def __init__(self, rank: int, ranks: tuple[int, ...], inboxes: dict[int, _Inbox]) -> None:
        self.rank = rank
        self.ranks = ranks
        self._inboxes = inboxes
        self._broken: str | None = None

    @classmethod
    def connect(
        cls, rank: int, ranks: tuple[int, ...], host: str, rendezvous: Rendezvous, timeout_s: float
    ) -> "Channel":
        """Collective over the group. ``host``: an address of this machine that the others reach.

        Raises:
            PeerLost: a rank did not come in ``timeout_s`` seconds.
        """
        if len(ranks) == 1:
            return cls(rank, ranks, {})
        deadline = time.monotonic() + timeout_s
        inboxes = _listen(ranks, host, rendezvous, deadline) if rank == 0 else _join(rank, rendezvous, deadline)
        return cls(rank, ranks, inboxes)

    def name_of(self, rank: int) -> str:
        return f"rank {rank} of the group (global rank {self.ranks[rank]})"

    def exchange(self, value: Any, what: str, timeout_s: float) -> list[Any]:
        """Give one value, get the list of all ranks' values in rank order. Collective over the group.

        Args:
            value: JSON-able, or bytes, or both nested; tuples arrive as lists.
            what: names the exchange in errors, and must be the same on all ranks.

        Raises:
            PeerLost: a rank died, did not come in ``timeout_s`` seconds, or was in another exchange.
        """
        if self._broken is not None:
            raise PeerLost(self._broken)
        if not self._inboxes:
            return [json.loads(json.dumps(value, default=_encode), object_hook=_decode)]
        frame = _pack({"what": what, "value": value})  # before anything is sent: what can't be packed harms nobody
        try:
            return self._gather(frame, what, timeout_s) if self.rank == 0 else self._send(frame, what, timeout_s)
        except PeerLost:
            raise
        except BaseException as error:  # of a signal: a reply may still come, and must not answer the next call
            self.close()
            self._broken = f"{self.name_of(self.rank)} was interrupted in '{what}' ({type(error).__name__})"
            raise

    def _gather(self, own: bytes, what: str, timeout_s: float) -> list[Any]:
        deadline = time.monotonic() + timeout_s
        frames, dead, late = _wait(self._inboxes, min(deadline, time.monotonic() + _NOTICE_S))
        if late and time.monotonic() < deadline:
            notice = _pack({"waiting": True})
            for rank in frames:
                self._try_send(self._inboxes[rank], notice, deadline)
            rest, dead, late = _wait({rank: self._inboxes[rank] for rank in late}, deadline)
            frames |= rest
        error = None
        if dead:
            error = f"{self.name_of(dead[0])} died during '{what}'"
        elif late:
            names = ", ".join(self.name_of(rank) for rank in late)
            error = f"{names} did not come to '{what}' within {timeout_s:g} s"
        else:
            strangers = [rank for rank, frame in frames.items() if frame["what"] != what]
            if strangers:
                other = frames[strangers[0]]["what"]
                error = f"{self.name_of(strangers[0])} is in '{other}' while {self.name_of(0)} is in '{what}'"
        frames[0] = json.loads(own[_HEADER.size :], object_hook=_decode)
        reply = {"error": error} if error else {"values": [frames[rank]["value"] for rank in range(len(self.ranks))]}
        packed = _pack(reply)
        for rank, inbox in self._inboxes.items():
            if rank not in dead and not self._try_send(inbox, packed, max(deadline, time.monotonic() + _GRACE_S)):
                error = error or f"{self.name_of(rank)} died during '{what}', or does not read"
        if error:
            raise self._break(error)
        return reply["values"]  # type: ignore[return-value]

    def _send(self, own: bytes, what: str, timeout_s: float) -> list[Any]:
        alive = self._try_send(self._inboxes[0], own, time.monotonic() + timeout_s)
        # Even when the first rank has hung up, its last words may be waiting.
        frames, _, late = _wait(self._inboxes, time.monotonic() + (timeout_s + _GRACE_S if alive else 0.0))
        while frames.get(0, {}).get("waiting"):
            frames, _, late = _wait(self._inboxes, time.monotonic() + timeout_s + _GRACE_S)
        if 0 not in frames:
            if late and alive:
                raise self._break(f"{self.name_of(0)} did not come to '{what}' within {timeout_s:g} s")
            raise self._break(f"{self.name_of(0)} died during '{what}'")
        if "error" in frames[0]:
            raise self._break(frames[0]["error"])
        return frames[0]["values"]

    @staticmethod
    def _try_send(inbox: _Inbox, data: bytes, deadline: float) -> bool:
        """False when the other end is gone, or has not read by then; the socket is of no use afterwards."""
        try:
            inbox.sock.settimeout(max(0.01, deadline - time.monotonic()))
            inbox.sock.sendall(data)
            inbox.sock.settimeout(None)
        except OSError:
            return False
        return True

    def _break(self, message: str) -> PeerLost:
        self._broken = message
        return PeerLost(message)

    def close(self) -> None:
        """Hang up. Idempotent, and no collective: a peer still in an exchange learns that this rank is gone."""
        for inbox in self._inboxes.values():
            inbox.sock.close()
        self._inboxes = {}
        self._broken = self._broken or "the channel is closed"


def _listen(ranks: tuple[int, ...], host: str, rendezvous: Rendezvous, deadline: float) -> dict[int, _Inbox]:
    token = base64.b64encode(os.urandom(16)).decode()
    inboxes: dict[int, _Inbox] = {}
    with socket.create_server((host, 0), backlog=len(ranks)) as server:
        port = server.getsockname()[1]
        rendezvous.publish(f"{host} {port} {token}")
        while len(inboxes) < len(ranks) - 1:
            server.settimeout(max(0.01, deadline - time.monotonic()))
            try:
                sock, _ = server.accept()
            except TimeoutError:
                missing = sorted(set(range(1, len(ranks))) - set(inboxes))
                names = ", ".join(f"rank {rank} of the group (global rank {ranks[rank]})" for rank in missing)
                raise PeerLost(f"{names} did not connect to the group's channel in time") from None
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            inbox = _Inbox(sock)
            hello = _wait({0: inbox}, min(deadline, time.monotonic() + 5.0))[0].get(0)
            if hello is None or hello.get("token") != token:
                sock.close()  # a stranger: only who read the store knows the token
                continue
            inboxes[hello["rank"]] = inbox
    return dict(sorted(inboxes.items()))


def _join(rank: int, rendezvous: Rendezvous, deadline: float) -> dict[int, _Inbox]:
    host, port, token = rendezvous.look_up(max(0.01, deadline - time.monotonic())).split()
    try:
        sock = socket.create_connection((host, int(port)), timeout=max(0.01, deadline - time.monotonic()))
    except OSError as error:
        raise PeerLost(f"can't reach the group's first rank at {host}:{port}: {error}") from error
    sock.settimeout(None)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.sendall(_pack({"rank": rank, "token": token}))
    return {0: _Inbox(sock)}
