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


def planned() -> Fault | None:
    """The fault asked for, or None.

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
    return Fault(step, int(rank), kind, int(call))


def strike(fault: Fault) -> Any:
    """Carry the fault out on this rank."""
    if fault.kind == "raise":
        raise FusionError(f"injected fault at {fault.step}")
    if fault.kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault.kind == "hang":
        time.sleep(3600)
    return None
