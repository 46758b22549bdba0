"""Run a step that may never return, and go on without it."""

import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


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
        raise TimeoutError(f"{name} did not end within {seconds:g} s")
    return outcome[0]
