"""The launcher's side of `launch`: watches the ranks of one command until all are done or one is lost."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from .launch import free_endpoints, rank_command, rank_environment

GRACE_S = 3.0  # between SIGTERM and SIGKILL
_DRAIN_MARGIN_S = 10.0  # what ranks that drain may take to close, after their own time limit
_STAGGER_S = 0.15  # Paddle's client sleeps 3 s when rank 0 does not listen yet
_SETTLE_S = 0.3  # the rank that failed first need not be the first to be heard of
_SETTLE_FOR_CAUSE_S = 2.0  # all that is known is that a peer is lost: time for that peer's own word
_POLL_S = 0.02
_KEPT_BYTES = 65536
_STOPPED = (128 + signal.SIGTERM, -signal.SIGTERM)  # how ranks end that SIGTERM met before they could drain
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@dataclass(frozen=True)
class Failure:
    """Why a rank ended. `order` is lower the nearer to the cause: 0 killed, 1 failed itself, 2 lost a peer."""

    order: int
    rank: int
    text: str
    code: int = 1
    traceback: str = ""
    silent: bool = False  # it could not say why: its stderr may


@dataclass
class _Rank:
    rank: int
    process: "subprocess.Popen[bytes]"
    report_fd: int
    report: bytes = b""
    kept: bytes = b""

    def drain(self) -> None:
        """Reads what has come in on the pipes; never blocks."""
        self.report += _read(self.report_fd)
        if self.process.stdout is not None:
            self.kept = (self.kept + _read(self.process.stdout.fileno()))[-_KEPT_BYTES:]

    def failure(self, num_ranks: int) -> Failure | None:
        """None while all is well: it runs and has reported nothing bad, or it is done."""
        report: dict[str, Any] = json.loads(self.report) if self.report.endswith(b"\n") else {}
        kind, code = report.get("kind"), self.process.poll()
        if kind in ("error", "peer_lost"):
            usage = report["code"] == 2  # every rank says the same of wrong input: no rank to name
            text = report["message"] if usage else f"rank {self.rank} of {num_ranks}: {report['message']}"
            order = 2 if kind == "peer_lost" else 1
            return Failure(order, self.rank, text, report["code"], report["traceback"])
        if code is None or (code == 0 and kind == "done"):
            return None
        if code < 0:
            text = f"rank {self.rank} of {num_ranks} was killed by {signal.Signals(-code).name}"
            return Failure(0, self.rank, text, code, silent=True)
        text = f"rank {self.rank} of {num_ranks} left before the work was done, with exit code {code}"
        return Failure(1, self.rank, text, code, silent=True)


@dataclass
class _Job:
    ranks: list[_Rank] = field(default_factory=list)
    asked_to_stop: int = 0
    times_asked: int = 0

    def ask_to_stop(self, number: int, frame: Any) -> None:
        self.asked_to_stop = number
        self.times_asked += 1

    def is_over(self, drain_until: float | None) -> bool:
        """Whether the ranks have had all the time they get, once somebody asked to stop."""
        if not self.asked_to_stop:
            return False
        return drain_until is None or self.times_asked > 1 or time.monotonic() > drain_until


def launch(
    target: str, argv: list[str], num_ranks: int, *, show_traceback: bool = False, drain_s: float | None = None
) -> int:
    """Runs `target` ("module:function") with `argv` on `num_ranks` ranks of this host; returns the exit code.

    Rank 0's stdout and stderr are this process's; the other ranks' are kept (the last 64 KiB) and shown only when
    such a rank dies without saying why. When a rank is lost the others are ended (SIGTERM, SIGKILL after 3 s), the
    first error is written to stderr once, and the code is not 0: the one the rank gave, 1 otherwise, 128+N after
    signal N to the launcher. Must be called in the main thread.

    With `drain_s`, a signal to the launcher is handed to rank 0 as SIGTERM, and the ranks get so many seconds to end by
    themselves; the code is then 0 if all did. A second signal ends them at once.
    """
    job = _Job()
    with _handling_signals(job):
        try:
            _start(job, target, argv, num_ranks)
            failures = _watch(job, drain_s)
        finally:
            _end(job)
    stopped = any(failure.code in _STOPPED for failure in failures)  # then the others only lost a peer
    if job.asked_to_stop and (stopped or not failures):
        done = drain_s is not None and all(rank.process.returncode == 0 for rank in job.ranks)
        return 0 if done else 128 + job.asked_to_stop
    if failures:
        first = min(failures, key=lambda failure: failure.order)
        _show(first, job.ranks[first.rank], show_traceback)
        return 1 if first.silent else first.code or 1
    return 0


def _start(job: _Job, target: str, argv: list[str], num_ranks: int) -> None:
    endpoints = free_endpoints(num_ranks)
    for rank in range(num_ranks):
        report_fd, write_fd = os.pipe()
        os.set_blocking(report_fd, False)
        try:
            process = subprocess.Popen(
                rank_command(target, argv, write_fd),
                env=rank_environment(rank, endpoints),
                stdin=subprocess.DEVNULL,
                stdout=None if rank == 0 else subprocess.PIPE,
                stderr=None if rank == 0 else subprocess.STDOUT,
                pass_fds=[write_fd],
                start_new_session=True,  # Ctrl-C reaches the launcher alone, which ends the ranks in order
            )
        finally:
            os.close(write_fd)
        if process.stdout is not None:  # stderr comes along with it
            os.set_blocking(process.stdout.fileno(), False)
        job.ranks.append(_Rank(rank, process, report_fd))
        if job.asked_to_stop:
            return
        if rank == 0:
            time.sleep(_STAGGER_S)


def _watch(job: _Job, drain_s: float | None) -> list[Failure]:
    """Until every rank is done, a failure has settled, or the time after being asked to stop is over."""
    failing_since = drain_until = None
    while True:
        if job.asked_to_stop and drain_until is None and drain_s is not None:
            drain_until = time.monotonic() + drain_s + _DRAIN_MARGIN_S
            if job.ranks[0].process.poll() is None:
                job.ranks[0].process.terminate()  # it tells the others
        if job.is_over(drain_until):
            return []
        all_ended = all(rank.process.poll() is not None for rank in job.ranks)
        for rank in job.ranks:
            rank.drain()
        failures = [f for rank in job.ranks if (f := rank.failure(len(job.ranks)))]
        if all_ended:
            return failures
        if failures:
            failing_since = failing_since or time.monotonic()
            cause_known = any(f.order < 2 for f in failures)
            if time.monotonic() - failing_since > (_SETTLE_S if cause_known else _SETTLE_FOR_CAUSE_S):
                return failures
        time.sleep(_POLL_S)


def _end(job: _Job) -> None:
    for rank in job.ranks:
        if rank.process.poll() is None:
            rank.process.terminate()
    deadline = time.monotonic() + GRACE_S
    for rank in job.ranks:
        with contextlib.suppress(subprocess.TimeoutExpired):
            rank.process.wait(max(0.0, deadline - time.monotonic()))
    for rank in job.ranks:
        if rank.process.poll() is None:
            rank.process.kill()
        rank.process.wait()
        rank.drain()
        os.close(rank.report_fd)
        if rank.process.stdout is not None:
            rank.process.stdout.close()


@contextlib.contextmanager
def _handling_signals(job: _Job) -> Iterator[None]:
    before = {number: signal.signal(number, job.ask_to_stop) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _show(failure: Failure, rank: _Rank, show_traceback: bool) -> None:
    if failure.silent and rank.kept:
        sys.stderr.write(rank.kept.decode(errors="replace").rstrip() + "\n")
    if show_traceback and failure.traceback:
        sys.stderr.write(failure.traceback)
    sys.stderr.write(f"error: {failure.text}\n")
    sys.stderr.flush()


def _read(fd: int) -> bytes:
    """All that lies in a non-blocking pipe."""
    parts = []
    with contextlib.suppress(BlockingIOError):
        while part := os.read(fd, 65536):
            parts.append(part)
    return b"".join(parts)
