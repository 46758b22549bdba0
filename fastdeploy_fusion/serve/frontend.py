"""The desk between HTTP and the engine: who is let in, what comes back to whom. Lives in the HTTP side's event loop."""

import asyncio
import itertools
import time
from collections.abc import Sequence as Tokens
from queue import SimpleQueue
from typing import Any

from .errors import ApiError
from .metrics import Metrics
from .scheduler import Event, Sampler, Sequence

LOST = "lost"
"""The finish reason of a request that the engine will not finish."""


class Ticket:
    """One request under way. ``events`` brings its tokens; the last has a finish reason."""

    def __init__(self, id: int) -> None:
        self.id = id
        self.events: asyncio.Queue[Event] = asyncio.Queue()
        self.created = self.last_token = time.monotonic()
        self.num_tokens = 0


class Frontend:
    """``inbox`` leads to the engine: ``("add", Sequence)``, ``("cancel", id)``, ``("drain", seconds)``.

    Everything but ``post``, ``drain`` and ``close_soon`` is for the event loop's thread alone.
    """

    def __init__(self, inbox: "SimpleQueue[tuple[str, Any]]", max_in_flight: int, metrics: Metrics) -> None:
        self.inbox, self.max_in_flight, self.metrics = inbox, max_in_flight, metrics
        self.draining = False
        self.closed_because: str | None = None
        self._tickets: dict[int, Ticket] = {}
        self._ids = itertools.count()
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def num_in_flight(self) -> int:
        return len(self._tickets)

    def attach(self) -> None:
        """Called in the event loop, once, before the first request."""
        self._loop = asyncio.get_running_loop()

    def check_open(self) -> None:
        """ApiError 503 when nothing new is taken, 429 when there is too much already."""
        if self.closed_because is not None:
            raise ApiError(503, self.closed_because, code="unavailable")
        if self.draining:
            raise ApiError(503, "the server is shutting down and takes no new requests", code="draining")
        if len(self._tickets) >= self.max_in_flight:
            raise ApiError(
                429, f"{self.max_in_flight} requests are under way, which is the limit; try again", code="queue_full"
            )

    def submit(self, prompt: Tokens[int], max_tokens: int, eos: frozenset[int], sampler: Sampler) -> Ticket:
        self.check_open()
        ticket = Ticket(next(self._ids))
        self._tickets[ticket.id] = ticket
        self.metrics.prompt_tokens.add(len(prompt))
        self.inbox.put(("add", Sequence(ticket.id, list(prompt), max_tokens, eos, sampler)))
        return ticket

    def cancel(self, ticket: Ticket) -> bool:
        """Nobody waits for it any more. Nothing is done for one that has ended: then the answer is False."""
        if self._tickets.pop(ticket.id, None) is None:
            return False
        self.inbox.put(("cancel", ticket.id))
        return True

    def complete(self, ticket: Ticket) -> None:
        """Its answer is whole, whatever the engine would add."""
        if self.cancel(ticket):
            self.metrics.latency.observe(time.monotonic() - ticket.created)

    def post(self, events: list[Event]) -> None:
        """From the engine's thread: what a step brought."""
        if events and self._loop is not None:
            self._loop.call_soon_threadsafe(self._deliver, events)

    def drain(self, seconds: float) -> None:
        """From any thread or a signal handler: take nothing new, let the engine end within ``seconds``."""
        self.draining = True
        self.inbox.put(("drain", seconds))

    def close_soon(self, reason: str) -> None:
        """From any thread: end what is under way, and answer new requests with ``reason``."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._close, reason)

    def _deliver(self, events: list[Event]) -> None:
        now = time.monotonic()
        for event in events:
            ticket = self._tickets.get(event.id)
            if ticket is None:
                continue  # cancelled meanwhile
            if event.token is not None:
                self.metrics.token(now, ticket.last_token, is_first=ticket.num_tokens == 0)
                ticket.last_token = now
                ticket.num_tokens += 1
            if event.finish_reason is not None:
                del self._tickets[event.id]
                self.metrics.latency.observe(now - ticket.created)
            ticket.events.put_nowait(event)

    def _close(self, reason: str) -> None:
        self.closed_because = reason
        lost = list(self._tickets.values())
        self._tickets.clear()
        for ticket in lost:
            ticket.events.put_nowait(Event(ticket.id, None, LOST))
