"""Starts the ranks of one command as processes of this host. Imports nothing heavy: the launcher never loads Paddle."""

from __future__ import annotations

import ctypes
import os
import random
import signal
import socket
import sys
from collections.abc import Mapping

_PR_SET_PDEATHSIG = 1
# Below the ephemeral range (usually 32768 and up): no outgoing connection can take such a port before Paddle binds it.
_PORTS = range(20000, 32000)


def free_endpoints(count: int) -> list[str]:
    """`count` distinct "127.0.0.1:port" addresses that nothing listened on a moment ago."""
    held: list[socket.socket] = []
    try:
        for port in random.SystemRandom().sample(_PORTS, len(_PORTS)):
            if len(held) == count:
                break
            candidate = socket.socket()
            try:
                candidate.bind(("127.0.0.1", port))
            except OSError:
                candidate.close()
                continue
            held.append(candidate)
        if len(held) < count:
            raise OSError(f"no {count} free ports on 127.0.0.1 in {_PORTS.start}..{_PORTS.stop - 1}")
        return [f"127.0.0.1:{s.getsockname()[1]}" for s in held]
    finally:
        for s in held:
            s.close()


def rank_environment(rank: int, endpoints: list[str], base: Mapping[str, str] | None = None) -> dict[str, str]:
    """Environment of rank `rank` of `len(endpoints)`: what Paddle needs to form a world over gloo, and quietly.

    `OMP_NUM_THREADS` is set to this rank's share of the cores unless `base` has it.
    """
    env = dict(os.environ if base is None else base)
    env.update(
        PADDLE_TRAINER_ID=str(rank),
        PADDLE_TRAINERS_NUM=str(len(endpoints)),
        PADDLE_TRAINER_ENDPOINTS=",".join(endpoints),
        PADDLE_CURRENT_ENDPOINT=endpoints[rank],
        PADDLE_DISTRI_BACKEND="gloo",
    )
    env.setdefault("GLOG_minloglevel", "2")
    env.setdefault("PYTHONWARNINGS", "ignore:No ccache found")
    env.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // len(endpoints))))
    return env


def child_path() -> list[str]:
    """This process's `sys.path` in absolute form, so that a child imports the very same package."""
    return [os.path.abspath(entry or os.getcwd()) for entry in sys.path]


def die_with_parent(parent: int) -> None:
    """Asks the kernel to SIGKILL this process when its parent `parent` dies; leaves at once when it is dead already."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)
