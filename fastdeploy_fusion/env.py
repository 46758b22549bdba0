"""Every ``FDFUSION_*`` environment variable: name, type, default and meaning. Nothing else reads them."""

import os
from dataclasses import dataclass


@dataclass(frozen=True)
class Variable:
    name: str
    default: str
    meaning: str


VARIABLES = (
    Variable("FDFUSION_OPEN_TIMEOUT_S", "20", "seconds that one start-up step of a workspace may take on any rank"),
    Variable("FDFUSION_JOIN_TIMEOUT_S", "600", "seconds that ranks may come to open() apart, as after uneven loading"),
    Variable("FDFUSION_CALL_TIMEOUT_S", "30", "seconds that a rank waits for its peers inside a collective on the CPU"),
    Variable(
        "FDFUSION_TUNED_TABLE",
        "",
        "table of measured token limits that open() reads; empty: tuned.json in the user's cache folder; off: none",
    ),
    Variable("FDFUSION_API_KEY", "", "what clients of `serve` must send, where --api-key is not given; empty: nothing"),
    Variable("FDFUSION_OWN_CORES", "1", "0: shm does not keep a rank's main thread on the rank's share of the cores"),
    Variable("FDFUSION_LOG_LEVEL", "INFO", "level of the log that the command line writes to stderr"),
    Variable("FDFUSION_DEBUG", "0", "1: the command line shows tracebacks instead of one-line errors"),
    Variable(
        "FDFUSION_FAULT",
        "",
        "for tests: STEP:RANK:KIND[:CALL], a fault to inject on one global rank; see fastdeploy_fusion/faults.py",
    ),
)
_MAX_SECONDS = 1e6
_DEFAULTS = {variable.name: variable.default for variable in VARIABLES}


def text(name: str) -> str:
    """The value of a known variable, or its default. An unknown name is a ``KeyError``: declare it above."""
    return os.environ.get(name, _DEFAULTS[name])


def seconds(name: str, default: float | None = None) -> float:
    """A positive number of seconds; ``default``: where it is unset, in place of the table's.

    Raises:
        ValueError: the variable holds something else.
    """
    if default is not None and name not in os.environ:
        return default
    value = text(name)
    try:
        number = float(value)
    except ValueError:
        number = 0.0
    if not 0 < number <= _MAX_SECONDS:
        raise ValueError(
            f"{name}={value!r} is not a number of seconds above 0 and up to {_MAX_SECONDS:g}; unset it for "
            f"{_DEFAULTS[name]}"
        )
    return number


def flag(name: str) -> bool:
    return text(name) not in ("", "0", "false", "no")
