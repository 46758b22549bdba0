"""All ranks of a replica in lock step: the first one plans, every rank runs the plan, nobody runs anything else.

What to run goes over the group's CPU-side channel as JSON. Ranks beside the first hold no requests, only the cache; all
they need to know of a step is its plan.
"""

import time
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any, Protocol

from ..channel import Channel
from .scheduler import Event, Plan, Scheduler

NEXT_STEP = "the server's next step"
_STOP = "stop"


class Runner(Protocol):
    def run(self, plan: Plan) -> Any:
        """Logits, a row for each of ``plan.rows``. Collective over the replica."""


class Engine:
    """The first rank's side. ``deliver`` gets the events of each step, in the engine's thread.

    beat_s: an idle engine meets the other ranks this often, so that nobody waits in vain for longer.
    timeout_s: how long it waits for them.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        channel: Channel,
        inbox: "SimpleQueue[tuple[str, Any]]",
        deliver: Callable[[list[Event]], None],
        *,
        beat_s: float,
        timeout_s: float,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """``check`` is called at every meeting and may raise."""
        self.scheduler, self.runner, self.channel = scheduler, runner, channel
        self.inbox, self.deliver, self.check = inbox, deliver, check
        self.beat_s, self.timeout_s = beat_s, timeout_s
        self.num_steps = 0
        self.last_beat = time.monotonic()
        self._ends_at: float | None = None

    def run(self) -> None:
        """Until drained: nothing is left to do, or its time is over. Then the other ranks are sent home.

        Raises:
            PeerLost, FusionError: a rank was lost.
        """
        while not self._is_drained():
            self._read_inbox()
            planned = self.scheduler.plan()
            if planned is None:
                self._meet(None)
                continue
            plan, sequences = planned
            self._meet(plan.to_json())
            logits = self.runner.run(plan)
            self.deliver(self.scheduler.commit(plan, sequences, logits))
            self.num_steps += 1
        self._meet(_STOP)

    def _meet(self, order: Any) -> None:
        self.check()
        self.channel.exchange(order, NEXT_STEP, self.timeout_s)
        self.last_beat = time.monotonic()

    def _is_drained(self) -> bool:
        if self._ends_at is None:
            return False
        return (not len(self.scheduler) and self.inbox.empty()) or time.monotonic() >= self._ends_at

    def _read_inbox(self) -> None:
        """All that lies there; with nothing to run, wait for something, at most for a beat."""
        wait = not len(self.scheduler) and self._ends_at is None
        try:
            self._handle(*self.inbox.get(wait, self.beat_s if wait else None))
            while True:
                self._handle(*self.inbox.get_nowait())
        except Empty:
            pass

    def _handle(self, kind: str, value: Any) -> None:
        if kind == "add":
            self.scheduler.add(value)
        elif kind == "cancel":
            self.scheduler.cancel(value)
        elif kind == "drain":
            ends_at = time.monotonic() + value
            self._ends_at = ends_at if self._ends_at is None else min(ends_at, self._ends_at)


def follow(runner: Runner, channel: Channel, timeout_s: float) -> None:
    """The other ranks' side: run what the first one plans, until it says to stop.

    ``timeout_s``: how long to wait for it; well above the engine's ``beat_s``.

    Raises:
        PeerLost, FusionError: a rank was lost.
    """
    while True:
        order = channel.exchange(None, NEXT_STEP, timeout_s)[0]
        if order == _STOP:
            return
        if order is not None:
            runner.run(Plan.from_json(order))
