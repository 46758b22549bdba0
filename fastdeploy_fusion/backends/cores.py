"""Ranks kept on cores of their own while they meet in shared memory.

Ranks that wake each other are put on one core by Linux, where they take turns: a call of one token then takes 95 us
instead of 44. Only the main thread is moved, to its rank's share of the cores, and only where nobody has chosen cores.
"""

import os

from .. import env


def claim() -> set[int] | None:
    """Keep this process's main thread on its rank's share. Returns the cores that it had, None if nothing was done."""
    size = int(os.environ.get("PADDLE_TRAINERS_NUM", "1"))
    rank = int(os.environ.get("PADDLE_TRAINER_ID", "0"))
    hosts = {endpoint.rpartition(":")[0] for endpoint in os.environ.get("PADDLE_TRAINER_ENDPOINTS", "").split(",")}
    had = os.sched_getaffinity(os.getpid())
    if not env.flag("FDFUSION_OWN_CORES") or len(hosts) > 1 or len(had) != os.cpu_count() or not 1 < size <= len(had):
        return None
    share = len(had) // size
    os.sched_setaffinity(os.getpid(), sorted(had)[rank * share : (rank + 1) * share])
    return had


def give_back(had: set[int] | None) -> None:
    """Undo ``claim``."""
    if had is not None:
        os.sched_setaffinity(os.getpid(), had)
