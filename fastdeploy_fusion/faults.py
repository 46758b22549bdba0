"""Faults for tests: ``FDFUSION_FAULT=STEP:RANK:KIND[:CALL]`` makes one global rank misbehave at one point.

STEP: ``probe``, ``decide``, ``preflight``, ``create``, ``self_test`` (start-up), or ``call`` (a collective at run
time; CALL counts from 1). KIND: ``raise``, ``none`` (returns nothing), ``hang``, ``kill`` (SIGKILL to itself).
Without the variable this costs one comparison at start-up and nothing in a call.
"""

import os
import signal
import time
from dataclasses import dataclass
from typing import Any

from . import env
from .errors import FusionError

STEPS = ("probe", "decide", "preflight", "create", "self_test", "call")
KINDS = ("raise", "none", "hang", "kill")


@dataclass(frozen=True)
class Fault:
    step: str
    rank: int
    kind: str
    call: int = 1


def planned(global_rank: int) -> Fault | None:
    """The fault asked for on this rank, or None.

    Raises:
        ValueError: the variable is not of the form above.
    """
    spec = env.text("FDFUSION_FAULT")
    if not spec:
        return None
    step, rank, kind, *rest = [*spec.split(":"), "", ""]
    call = rest[0] or "1"
    if step not in STEPS or kind not in KINDS or not rank.isdigit() or not call.isdigit():
        raise ValueError(f"FDFUSION_FAULT={spec!r} is not STEP:RANK:KIND[:CALL], STEP of {STEPS}, KIND of {KINDS}")
    fault = Fault(step, int(rank), kind, int(call))
    return fault if fault.rank == global_rank else None


def sabotage(backend: Any, global_rank: int) -> Any:
    """The backend, or one that fails at the call that was asked for."""
    fault = planned(global_rank)
    return FaultyBackend(backend, fault) if fault is not None and fault.step == "call" else backend


def strike(fault: Fault) -> Any:
    """Carry the fault out on this rank."""
    if fault.kind == "raise":
        raise FusionError(f"injected fault at {fault.step}")
    if fault.kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault.kind == "hang":
        time.sleep(3600)
    return None


class FaultyBackend:
    """A backend whose call number ``fault.call`` goes wrong."""

    def __init__(self, backend: Any, fault: Fault) -> None:
        self._backend = backend
        self._fault = fault
        self._calls = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def add_rms_norm(self, *operands: Any) -> Any:
        return self._call(self._backend.add_rms_norm, operands)

    def all_reduce(self, *operands: Any) -> Any:
        return self._call(self._backend.all_reduce, operands)

    def _call(self, call: Any, operands: tuple[Any, ...]) -> Any:
        self._calls += 1
        return strike(self._fault) if self._calls == self._fault.call else call(*operands)
