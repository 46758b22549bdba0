"""What one fusion has decided for each kind of call, and how often each site of the model took which path and why."""

import logging
from collections import Counter
from typing import Any, NamedTuple

import paddle

from .config import DTYPES, FusionConfig
from .errors import WorkspaceError
from .host_values import DTYPE_NAMES
from .policy import Decision, GroupState, Op, Path, Reason, Request, decide

log = logging.getLogger(__name__)

_DTYPES_ARE_SINGLE = not hasattr(paddle.float32, "value")
_MAX_KNOWN = 8192
_UNFUSED = (Path.SUMMED, Path.PLAIN)
_SETTINGS = (Reason.DISABLED, Reason.ONE_RANK)
"""Plain by the user's own choice: nothing was refused, so nothing is logged."""

Verdict = tuple[str, str, str]
"""``(op, path, reason)``."""


class Ledger:
    """Decides each kind of call once and counts all of them by site. A site is a weight prefix; "" where none is told.

    A call that is known costs two look-ups, 2 us; text is only made where a kind of call is seen for the first time.
    """

    def __init__(self, state: GroupState, config: FusionConfig, *, logs: bool) -> None:
        """``logs``: whether this rank is the one of its group that writes the log."""
        self.state, self.config, self.logs = state, config, logs
        self.closed = False
        self._known: dict[tuple[Any, ...], _Known] = {}
        self._calls: dict[Verdict, Counter[str]] = {}

    def decide(
        self, op: Op, x: Any, residual: Any | None, weight: Any | None, site: str, weight_bias: float = 0.0
    ) -> Decision:
        """The decision for a call on these operands, counted for ``site``. Equal on all ranks for equal operands.

        Raises:
            TypeError, ValueError: operands that no path can take.
            WorkspaceError: the fusion is closed.
        """
        # Without ``op``: only the norm has a weight, and hashing an Enum costs as much as the rest of the key.
        key = (
            tuple(x.shape),
            _dtype_code(x),
            None if residual is None else (tuple(residual.shape), _dtype_code(residual)),
            # Not by its id: a weight that was cast in place keeps that, and would be misread.
            None if weight is None else (tuple(weight.shape), _dtype_code(weight)),
            weight_bias,
        )
        known = self._known.get(key)
        if known is None:
            known = self._learn(key, op, x, residual, weight, site)
        known.calls[site] += 1
        return known.decision

    def counters(self) -> Counter[Verdict]:
        """``(op, path, reason) -> calls`` of all sites so far."""
        return Counter({verdict: sum(calls.values()) for verdict, calls in self._calls.items()})

    def site_counters(self) -> Counter[tuple[str, str, str, str]]:
        """``(site, op, path, reason) -> calls`` so far."""
        return Counter({(site, *v): calls for v, sites in self._calls.items() for site, calls in sites.items()})

    def reconfigure(self, config: FusionConfig) -> None:
        """Decide anew from here on; what was counted stays."""
        self.config = config
        self._known.clear()

    def close(self) -> None:
        """Decide nothing more; what was counted stays."""
        self.closed = True
        self._known.clear()

    def check_open(self) -> None:
        if self.closed:
            raise WorkspaceError("this AllReduceFusion is closed; open a new one")

    def _learn(self, key: tuple[Any, ...], op: Op, x: Any, residual: Any, weight: Any, site: str) -> "_Known":
        self.check_open()
        _check_operands(op, x, residual, weight)
        weight_dtype = None if weight is None else DTYPE_NAMES[weight.dtype]
        request = Request(op, key[0], DTYPE_NAMES[x.dtype], weight_dtype, residual is not None, bool(key[-1]))
        decision = decide(request, self.state, self.config)
        verdict = (op.value, decision.path.value, decision.reason.value)
        if verdict not in self._calls:
            self._calls[verdict] = Counter()
            if self.logs and decision.path in _UNFUSED and decision.reason not in _SETTINGS:
                where = f" (at {site})" if site else ""
                why = str(decision).partition(": ")[2]
                log.info("first %s on the %s path%s: %s; %s",
                         op.value, decision.path.value, where, why, layout(x, residual, weight))  # fmt: skip
        if len(self._known) >= _MAX_KNOWN:
            self._known.clear()
        known = self._known[key] = _Known(decision, self._calls[verdict])
        return known


class _Known(NamedTuple):
    decision: Decision
    calls: Counter[str]


def layout(x: Any, residual: Any | None, weight: Any | None) -> str:
    """The operands' shapes, dtypes, places and, where rows are not packed, strides, in words."""
    named = (("input", x), ("residual", residual), ("weight", weight))
    return ", ".join(f"{name} {_describe(operand)}" for name, operand in named if operand is not None)


def _describe(tensor: Any) -> str:
    dtype = DTYPE_NAMES.get(tensor.dtype, str(tensor.dtype))
    strides = "" if tensor.is_contiguous() else f" with strides {list(tensor.strides)}"
    return f"{list(tensor.shape)} {dtype} on {str(tensor.place)[6:-1]}{strides}"


def _dtype_code(tensor: Any) -> int:
    """Equal for equal dtypes. Paddle 3 has one object a dtype; in 2.6 comparing two costs as much as all else here."""
    dtype = tensor.dtype
    return id(dtype) if _DTYPES_ARE_SINGLE else dtype.value


def _check_operands(op: Op, x: Any, residual: Any | None, weight: Any | None) -> None:
    """Refuse what no path can take. Shapes and dtypes are equal on all ranks, so all of them refuse together."""
    if op is Op.ADD_RMS_NORM and weight is None:
        raise TypeError(f"{op.value}: weight is None; give the norm's, [hidden]")
    if not x.shape:
        raise ValueError(f"{op.value}: the input is a single number; it must be [num_tokens, hidden]")
    for name, operand in (("input", x), ("residual", residual), ("weight", weight)):
        if operand is not None and operand.dtype not in DTYPE_NAMES:
            raise TypeError(f"{op.value}: {name} is {operand.dtype}; it must be one of {', '.join(DTYPES)}")
    if residual is not None and residual.shape != x.shape:
        raise ValueError(f"{op.value}: residual is {residual.shape} and the input {x.shape}; they must be equal")
    if residual is not None and residual.dtype != x.dtype:
        raise TypeError(f"{op.value}: residual is {residual.dtype} and the input {x.dtype}; cast one to the other's")
    if weight is not None and weight.shape != x.shape[-1:]:
        raise ValueError(f"{op.value}: weight is {weight.shape} and the input {x.shape}; it must be {x.shape[-1:]}")
