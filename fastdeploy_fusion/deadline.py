"""Run a step that may never return, and go on without it."""

import atexit
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
_abandoned: list[threading.Thread] = []
_AT_EXIT_S = 2.0


def run_within(step: Callable[[], T], seconds: float, name: str) -> T:
    """The step's result, or its exception.

    Raises:
        TimeoutError: it did not end in time. Its thread goes on as a daemon, and what it still does is ignored.
    """
    outcome: list[T] = []
    failure: list[BaseException] = []

    def work() -> None:
        try:
            outcome.append(step())
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=work, name=f"fastdeploy_fusion-{name}", daemon=True)
    thread.start()
    thread.join(seconds)
    if failure:
        raise failure.pop()  # no name for it here: that would keep its frames, and what they hold, until a collection
    if not outcome:
        if not _abandoned:
            atexit.register(_wait_for_abandoned)
        _abandoned.append(thread)
        raise TimeoutError(f"{name} did not end within {seconds:g} s")
    return outcome[0]


def _wait_for_abandoned() -> None:
    """The interpreter stops what still runs, which inside Paddle's C++ ends in SIGABRT: a slow step gets a moment."""
    for thread in _abandoned:
        thread.join(_AT_EXIT_S / len(_abandoned))
