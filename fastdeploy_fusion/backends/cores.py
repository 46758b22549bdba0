"""Ranks kept on cores of their own while they meet in shared memory.

Ranks that wake each other are put on one core by Linux, where they take turns: a call of one token then takes 95 us
instead of 44. Only the main thread is moved, to its rank's share of the cores, and only where nobody has chosen cores.
"""

import os

from .. import env


class _Claims:
    """How many backends of this process want the share, and the cores that the process had before the first."""

    def __init__(self) -> None:
        self.count = 0
        self.had: set[int] | None = None


_claims = _Claims()  # affinity belongs to the process, and so does this


def claim() -> None:
    """Keep this process's main thread on its rank's share, until ``give_back`` was called as often."""
    _claims.count += 1
    if _claims.count > 1:
        return
    size = int(os.environ.get("PADDLE_TRAINERS_NUM", "1"))
    rank = int(os.environ.get("PADDLE_TRAINER_ID", "0"))
    hosts = {endpoint.rpartition(":")[0] for endpoint in os.environ.get("PADDLE_TRAINER_ENDPOINTS", "").split(",")}
    had = os.sched_getaffinity(os.getpid())
    if not env.flag("FDFUSION_OWN_CORES") or len(hosts) > 1 or len(had) != os.cpu_count() or not 1 < size <= len(had):
        return
    share = len(had) // size
    os.sched_setaffinity(os.getpid(), sorted(had)[rank * share : (rank + 1) * share])
    _claims.had = had


def give_back() -> None:
    """Undo one ``claim``; the last one gives the process its cores back."""
    _claims.count -= 1
    if _claims.count == 0 and _claims.had is not None:
        os.sched_setaffinity(os.getpid(), _claims.had)
        _claims.had = None
