"""What a run of ranks may not leave: living processes, and segments in /dev/shm."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Sequence
from pathlib import Path


def shm_names() -> set[str]:
    try:
        return set(os.listdir("/dev/shm"))
    except FileNotFoundError:
        return set()


def left_behind(token: str, pids: list[int], shm_before: set[str]) -> list[str]:
    """Processes of this run that live (ended here) or new segments of ours in /dev/shm, after a moment's grace."""
    deadline = time.monotonic() + 2
    while (processes := processes_with(token)) or (segments := new_segments(shm_before, pids)):
        if time.monotonic() > deadline:
            commands = [f"{pid} {_command(pid)}" for pid in processes]
            for pid in processes:
                os.kill(pid, signal.SIGKILL)
            return [f"left behind: processes {commands}, /dev/shm: {[] if processes else segments}"]
        time.sleep(0.05)
    return []


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()[:200]
    except OSError:
        return "(gone)"


def new_segments(before: set[str], pids: Sequence[int] = ()) -> list[str]:
    """Names in /dev/shm that were not in `before`, less those that carry the pid of another living process."""
    left = []
    for name in shm_names() - before:
        owners = {int(digits) for digits in re.findall(r"\d+", name)[:4] if len(digits) < 10}
        if not any(pid not in pids and os.path.exists(f"/proc/{pid}") for pid in owners if pid > 1):
            left.append(name)
    return sorted(left)


def processes_with(token: str) -> list[int]:
    """Pids of living processes (no zombies) whose environment holds `token`, this one excepted."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                if token.encode() in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue
    return found
