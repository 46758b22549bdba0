"""Runs test functions on real ranks: one fresh interpreter a rank, results back as JSON, nothing left behind.

    run_ranks(2, "tests.multi.test_x:body", 3)      -> [result of rank 0, result of rank 1]
    run_cases(2, [(body, 3), (other, "a")])         -> the same for several bodies in ONE set of processes, in order
    run_ranks(2, body, on_failure="observe")        -> [Outcome, Outcome], for tests that break a rank on purpose
    ... on_failure="observe_first"                  -> the same, but the others are ended soon after the first failure

A body is a function at module level, `body(rank, num_ranks, *args)`, with JSON-able arguments and result. A rank that
has finished waits until all have (or one failed), so no body needs a closing barrier.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastdeploy_fusion.launch import child_path, die_with_parent, free_endpoints, rank_environment
from tests.leftovers import left_behind, shm_names

Body = str | Callable[..., Any]
_TOKEN = "RANKS_OF_TEST"
_GRACE_S = 2.0
_STAGGER_S = 0.15  # Paddle's client sleeps 3 s when rank 0 does not listen yet
_BOOT = "import sys; sys.path[:] = {path!r}; from tests.ranks import child; child({folder!r}, {rank}, {parent})"


@dataclass(frozen=True)
class Outcome:
    """How one rank ended: `code` is the exit code (-N: killed by signal N), `seconds` counts from the start of all."""

    rank: int
    code: int
    seconds: float
    stderr: str
    results: list[Any]  # of the cases it finished
    ended_by_harness: bool

    @property
    def ok(self) -> bool:
        return self.code == 0

    def describe(self) -> str:
        how = f"signal {signal.Signals(-self.code).name}" if self.code < 0 else f"exit code {self.code}"
        note = " (ended by the harness)" if self.ended_by_harness else ""
        return f"--- rank {self.rank}: {how}{note} after {self.seconds:.1f} s\n{self.stderr[-6000:]}"


class RanksFailed(AssertionError):
    """A rank failed or the deadline passed; the text holds every failed rank's stderr."""


def run_ranks(
    num_ranks: int,
    body: Body,
    *args: Any,
    timeout_s: float = 60,
    env: dict[str, str] | None = None,
    on_failure: str = "raise",
) -> Any:
    """Runs one body on `num_ranks` ranks; returns its result of every rank, or Outcomes with `on_failure="observe"`."""
    observe = _observes(on_failure)
    kill_on_failure = on_failure != "observe"
    outcomes = _run(num_ranks, [(body, *args)], timeout_s, env, observe=observe, kill_on_failure=kill_on_failure)
    return outcomes if observe else [o.results[0] for o in outcomes]


def run_cases(
    num_ranks: int,
    cases: Sequence[Body | tuple[Any, ...]],
    *,
    timeout_s: float = 120,
    env: dict[str, str] | None = None,
) -> list[list[Any]]:
    """Runs several `body` or `(body, *args)` one after another in one set of ranks; returns [case][rank]."""
    tuples = [case if isinstance(case, tuple) else (case,) for case in cases]
    outcomes = _run(num_ranks, tuples, timeout_s, env, observe=False, kill_on_failure=True)
    return [[o.results[i] for o in outcomes] for i in range(len(tuples))]


def _observes(on_failure: str) -> bool:
    if on_failure not in ("raise", "observe", "observe_first"):
        raise ValueError(f"on_failure={on_failure!r}: must be 'raise', 'observe' or 'observe_first'")
    return on_failure != "raise"


def _spec(body: Body) -> str:
    if isinstance(body, str):
        return body
    if "." in body.__qualname__:
        raise ValueError(f"{body.__qualname__} is not at module level: ranks import it by its name")
    return f"{body.__module__}:{body.__qualname__}"


def _run(
    num_ranks: int,
    cases: Sequence[tuple[Any, ...]],
    timeout_s: float,
    env: Any,
    *,
    observe: bool,
    kill_on_failure: bool,
) -> list[Outcome]:
    token = f"{os.getpid()}-{secrets.token_hex(6)}"
    shm_before = shm_names()
    with tempfile.TemporaryDirectory(prefix="ranks-") as name:
        folder = Path(name)
        folder.joinpath("cases.json").write_text(json.dumps([[_spec(c[0]), list(c[1:])] for c in cases]))
        ranks = _RankSet(folder, num_ranks, {**(env or {}), _TOKEN: token})
        try:
            timed_out = not ranks.wait(timeout_s, kill_on_failure=kill_on_failure)
        finally:
            ranks.end()
        outcomes = ranks.outcomes()
    wrong = [
        *_failures(outcomes, timeout_s if timed_out else None, observe),
        *left_behind(token, ranks.pids, shm_before),
    ]
    if wrong:
        raise RanksFailed("\n".join(wrong))
    return outcomes


def _failures(outcomes: list[Outcome], passed_s: float | None, observe: bool) -> list[str]:
    """What to say of ranks that failed, or that were not done when the deadline of `passed_s` had passed."""
    bad = [o for o in outcomes if not o.ok]
    if passed_s is not None:
        return [f"not done after {passed_s:g} s", *(o.describe() for o in bad)]
    if not bad or observe:
        return []
    own = [o for o in bad if not o.ended_by_harness]
    return [f"{len(own)} of {len(outcomes)} ranks failed", *(o.describe() for o in own or bad)]


class _RankSet:
    """The processes of one run; files in `folder`: cases.json, <rank>.err, <rank>.<case>.json."""

    def __init__(self, folder: Path, num_ranks: int, env: dict[str, str]) -> None:
        self.folder = folder
        self.started = time.monotonic()
        self.ended: dict[int, float] = {}
        self.ended_by_harness: set[int] = set()
        self.processes: list[subprocess.Popen[bytes]] = []
        endpoints = free_endpoints(num_ranks)
        try:
            for rank in range(num_ranks):
                self.processes.append(self._start(rank, {**rank_environment(rank, endpoints), **env}))
                if rank == 0 and num_ranks > 1:
                    time.sleep(_STAGGER_S)
        except BaseException:
            self.end()
            raise
        self.pids = [p.pid for p in self.processes]

    def _start(self, rank: int, env: dict[str, str]) -> subprocess.Popen[bytes]:
        boot = _BOOT.format(path=child_path(), folder=str(self.folder), rank=rank, parent=os.getpid())
        with open(self.folder / f"{rank}.err", "wb") as err:
            return subprocess.Popen(
                [sys.executable, "-c", boot], env=env, stdin=subprocess.PIPE, stdout=err, stderr=err
            )

    def wait(self, timeout_s: float, kill_on_failure: bool) -> bool:
        """Waits for all; False when the deadline passed. After a failure the others get a short grace, then end."""
        failed_at = None
        while len(self.ended) < len(self.processes):
            now = time.monotonic()
            for rank, process in enumerate(self.processes):
                if rank not in self.ended and process.poll() is not None:
                    self.ended[rank] = now - self.started
                    if process.returncode != 0:
                        failed_at = failed_at or now
            if failed_at or all(r in self.ended or self._finished(r) for r in range(len(self.processes))):
                self._release()
            if kill_on_failure and failed_at and now - failed_at > _GRACE_S:
                return True
            if now - self.started > timeout_s:
                self._dump_stacks()
                return False
            time.sleep(0.01)
        return True

    def _finished(self, rank: int) -> bool:
        return (self.folder / f"{rank}.done").exists()

    def _release(self) -> None:
        for process in self.processes:
            if process.stdin and not process.stdin.closed:
                process.stdin.close()

    def _dump_stacks(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(signal.SIGUSR1)
        time.sleep(0.3)

    def end(self) -> None:
        self._release()
        for rank, process in enumerate(self.processes):
            if process.poll() is None:
                self.ended_by_harness.add(rank)
                process.kill()
        for rank, process in enumerate(self.processes):
            process.wait(10)
            self.ended.setdefault(rank, time.monotonic() - self.started)

    def outcomes(self) -> list[Outcome]:
        return [
            Outcome(
                rank=rank,
                code=process.returncode,
                seconds=self.ended[rank],
                stderr=(self.folder / f"{rank}.err").read_text(errors="replace"),
                results=self._results(rank),
                ended_by_harness=rank in self.ended_by_harness,
            )
            for rank, process in enumerate(self.processes)
        ]

    def _results(self, rank: int) -> list[Any]:
        found: list[Any] = []
        while (path := self.folder / f"{rank}.{len(found)}.json").exists():
            found.append(json.loads(path.read_text()))
        return found


def child(folder: str, rank: int, parent: int) -> None:
    """Entry of a rank's process: runs all cases, writes each result, waits to be released. Never returns."""
    die_with_parent(parent)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    num_ranks = int(os.environ["PADDLE_TRAINERS_NUM"])
    code = 0
    try:
        for index, (spec, args) in enumerate(json.loads(Path(folder, "cases.json").read_text())):
            module, _, name = spec.partition(":")
            result = getattr(importlib.import_module(module), name)(rank, num_ranks, *args)
            _write(Path(folder, f"{rank}.{index}.json"), json.dumps(result))
        _write(Path(folder, f"{rank}.done"), "")
        sys.stdin.read()  # until the harness closes it: leaving early would break a peer's collective
    except BaseException as error:
        traceback.print_exc()
        code = error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else 1
    sys.stdout.flush()
    sys.stderr.flush()
    sys.exit(code)


def _write(path: Path, text: str) -> None:
    partial = path.with_suffix(".part")
    partial.write_text(text)
    partial.rename(path)
