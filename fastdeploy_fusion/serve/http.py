"""uvicorn in a thread of its own, so that the engine keeps the main thread and the signals."""

import asyncio
import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from .connections import HEAD_S, Connections, room_for

_GRACE_S = 2.0  # for answers that are being sent when the server stops
_SPARE_CONNECTIONS = 1024


def listen_on(host: str, port: int) -> socket.socket:
    """A socket that listens: a taken port shows before a model is loaded. Bound alone, two could have one port; who
    comes before the server is ready waits.

    Raises:
        ValueError: the address can't be had.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, kind, protocol)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen()
    except (OSError, UnicodeError) as error:
        raise ValueError(f"can't listen on {host} port {port}: {error}; choose another --host or --port") from error
    return sock


class HttpThread:
    """Serves ``app`` on a bound socket from ``start`` to ``stop``. ``on_loop`` runs in the event loop first."""

    def __init__(
        self,
        app: ASGIApp,
        sock: socket.socket,
        max_in_flight: int,
        on_loop: Callable[[], None],
        *,
        head_s: float = HEAD_S,
    ) -> None:
        limit, backlog = room_for(max_in_flight + _SPARE_CONNECTIONS)
        self._connections = Connections(limit, head_s)
        make: Any = self._connections.make
        config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            lifespan="off",
            loop="asyncio",
            ws="none",
            server_header=False,
            http=make,
            backlog=backlog,
        )
        self._server, self._sock, self._on_loop = uvicorn.Server(config), sock, on_loop
        self._error: BaseException | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="http", daemon=True)

    def start(self, timeout_s: float = 30.0) -> None:
        """Returns when the port answers; RuntimeError if it never does."""
        logging.getLogger("uvicorn").setLevel(logging.ERROR)  # it warns of each request that strangers got wrong
        self._thread.start()
        deadline = time.monotonic() + timeout_s
        while not self._server.started:
            self.check()
            if time.monotonic() > deadline:
                raise RuntimeError(f"the HTTP side did not start within {timeout_s:g} s")
            time.sleep(0.01)

    def check(self) -> None:
        """RuntimeError when the thread has ended."""
        if not self._thread.is_alive():
            raise RuntimeError(f"the HTTP side ended: {self._error or 'without a word'}") from self._error

    def stop(self) -> None:
        """Lets answers go out that are ready, and closes the port. Idempotent."""
        self._server.should_exit = True
        if self._thread.is_alive():
            self._thread.join(_GRACE_S)
        if self._thread.is_alive() and self._loop is not None:
            with contextlib.suppress(RuntimeError):  # it has just closed
                self._loop.call_soon_threadsafe(self._connections.close_all)
            self._thread.join(_GRACE_S)
        self._sock.close()

    def _run(self) -> None:
        async def serve() -> None:
            self._loop = asyncio.get_running_loop()
            self._on_loop()
            await self._server.serve(sockets=[self._sock])

        try:
            with contextlib.suppress(SystemExit):
                asyncio.run(serve())
        except BaseException as error:
            self._error = error
