"""Starts one command as N ranks on this host, and ends all of them when one is lost. The launcher never loads Paddle.

A rank tells the launcher how it ended by one JSON line on a pipe, so that the launcher alone decides which of several
errors came first and says it once. A rank that dies without a word is named with its signal or exit code.
"""

import ctypes
import importlib
import json
import os
import random
import signal
import socket
import sys
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .errors import PeerLost

_PR_SET_PDEATHSIG = 1
_TCP_LISTEN = "0A"
# Below the ephemeral range (usually 32768 and up): no outgoing connection can take such a port before Paddle binds it.
_PORTS = range(20000, 32000)
# Variables of another launch that Paddle would follow instead of the ones set here.
_OTHER_WORLDS = ("MASTER_ADDR", "MASTER_PORT", "PADDLE_MASTER")


def free_endpoints(count: int) -> list[str]:
    """`count` distinct "127.0.0.1:port" addresses that nothing listened on a moment ago.

    Raises:
        OSError: there are not that many.
    """
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
    """Environment of rank `rank` of `len(endpoints)`: what Paddle needs to form a world, and quietly. Each
    rank chooses between NCCL and gloo itself, once Paddle is loaded (groups.choose_device).

    `OMP_NUM_THREADS` is set to this rank's share of the cores unless `base` (default: this process's) has it.
    """
    env = dict(os.environ if base is None else base)
    for name in _OTHER_WORLDS:
        env.pop(name, None)
    env.update(
        PADDLE_TRAINER_ID=str(rank),
        PADDLE_TRAINERS_NUM=str(len(endpoints)),
        PADDLE_TRAINER_ENDPOINTS=",".join(endpoints),
        PADDLE_CURRENT_ENDPOINT=endpoints[rank],
    )
    env.setdefault("GLOG_minloglevel", "2")
    env.setdefault("PYTHONWARNINGS", "ignore:No ccache found")
    env.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // len(endpoints))))
    return env


def started_as_rank(environ: Mapping[str, str] | None = None) -> bool:
    """True when a launcher (this one or Paddle's) started this process as one of several ranks."""
    number = (os.environ if environ is None else environ).get("PADDLE_TRAINERS_NUM", "1")
    return number.isdigit() and int(number) > 1


def wait_for_first_rank(timeout_s: float = 60.0) -> None:
    """On ranks above 0 of one host: returns when rank 0 listens, or after `timeout_s`; call before Paddle connects.

    Paddle's client sleeps 3 s after a refused connection. The kernel's table of sockets is read, so that no
    connection is made that rank 0 would have to make sense of.
    """
    host, _, port = os.environ.get("PADDLE_TRAINER_ENDPOINTS", "").split(",")[0].rpartition(":")
    elsewhere = any(name in os.environ for name in _OTHER_WORLDS)
    if host != "127.0.0.1" or not port.isdigit() or elsewhere or os.environ.get("PADDLE_TRAINER_ID") == "0":
        return
    deadline = time.monotonic() + timeout_s
    while not _listening(int(port)) and time.monotonic() < deadline:
        time.sleep(0.01)


def _listening(port: int) -> bool:
    """Whether a TCP socket of this host listens on `port`; True where the kernel's table can't be read."""
    try:
        rows = [row.split() for name in ("tcp", "tcp6") for row in Path("/proc/net", name).read_text().splitlines()]
    except OSError:
        return True
    return any(row[1].endswith(f":{port:04X}") and row[3] == _TCP_LISTEN for row in rows)


def child_path() -> list[str]:
    """This process's `sys.path` in absolute form, so that a child imports the very same package."""
    return [os.path.abspath(entry or os.getcwd()) for entry in sys.path]


def die_with_parent(parent: int) -> None:
    """Asks the kernel to SIGKILL this process when its parent `parent` dies; leaves at once when it is dead already."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def rank_command(target: str, argv: list[str], report_fd: int) -> list[str]:
    """Command line of a rank that runs `target` ("module:function", called with `argv`)."""
    boot = (
        f"import sys; sys.path[:] = {child_path()!r}; from fastdeploy_fusion.launch import run_rank; "
        f"run_rank({target!r}, {report_fd}, {os.getpid()})"
    )
    return [sys.executable, "-c", boot, *argv]


def run_rank(target: str, report_fd: int, parent: int) -> None:
    """Entry of a rank's process: runs `target`, reports how it ended, exits. Never returns."""
    die_with_parent(parent)
    os.set_inheritable(report_fd, False)
    leave_on_sigterm()
    module, _, name = target.partition(":")
    try:
        code = getattr(importlib.import_module(module), name)(sys.argv[1:])
        report: dict[str, Any] = {"kind": "done"}
    except (SystemExit, KeyboardInterrupt) as leaving:
        code = leaving.code if isinstance(leaving, SystemExit) and isinstance(leaving.code, int) else 1
        report = {"kind": "left", "code": code}
    except BaseException as error:
        report = report_of(error)
        code = report["code"]
    os.write(report_fd, json.dumps(report).encode() + b"\n")
    sys.exit(code)


def report_of(error: BaseException) -> dict[str, Any]:
    """What a rank says of an exception: kind, message, exit code (the exception's `exit_code`, else 1), traceback."""
    return {
        "kind": "peer_lost" if isinstance(error, PeerLost) else "error",
        "message": error_message(error),
        "code": getattr(error, "exit_code", 1),
        "traceback": "".join(traceback.format_exception(error))[-20000:],
    }


def error_message(error: BaseException) -> str:
    """The text of an exception that was meant for people; with its type in front where it may not have been."""
    text = str(error).strip()
    meant_for_people = hasattr(error, "exit_code") or type(error).__module__.startswith("fastdeploy_fusion")
    return text if meant_for_people and text else f"{type(error).__name__}: {text}".rstrip(": ")


def leave_on_sigterm() -> None:
    """SIGTERM raises SystemExit(143), so that what is open gets closed. Call again after `import paddle`, which
    replaces the handler by one that prints a C++ traceback."""
    signal.signal(signal.SIGTERM, leave)


def leave(number: int, frame: Any) -> None:
    """A signal's handler: SystemExit(128+N). SIGTERM after that ends the process without a word."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    raise SystemExit(128 + number)
