"""The FFI function behind FlashInfer's `trtllm_allreduce_fusion`, and which of its arguments is which.

FlashInfer's Python wrapper passes its own parameters on to the compiled function by position. Rather than trusting a
version number for that order, the wrapper's code is run once with a recorder in place of the compiled module, which
tells the order for certain. A wrapper that is anything else than such a pass-through is not bound, and FlashInfer's
public call is used.
"""

from __future__ import annotations

import inspect
import types
from dataclasses import dataclass
from typing import Any

NAME = "trtllm_allreduce_fusion"
ALL_REDUCE, NORM = 0, 1  # AllReduceFusionPattern.kAllReduce, .kARResidualRMSNorm
NEEDED = frozenset(
    {
        "allreduce_in", "world_size", "world_rank", "token_num", "hidden_dim", "workspace_ptrs", "launch_with_pdl",
        "use_oneshot", "trigger_completion_at_end", "fp32_acc", "pattern_code", "allreduce_out", "residual_in",
        "residual_out", "norm_out", "rms_gamma", "rms_eps",
    }
)  # fmt: skip
# Outputs and scales of patterns that this package does not use.
UNUSED = ("quant_out", "scale_out", "scale_factor", "layout_code", "block_quant_group_size")


class NotUnderstood(RuntimeError):
    """FlashInfer's wrapper is not the pass-through that binding relies on."""


@dataclass(frozen=True)
class Binding:
    """`function(*args)` with one value for each name of `order`."""

    function: Any
    order: tuple[str, ...]

    def arguments(self, values: dict[str, Any]) -> list[Any]:
        """The positional arguments for `values`; names that are not given are None."""
        return [values.get(name) for name in self.order]


def bind(inner: Any) -> Binding:
    """Load FlashInfer's compiled module (building it where it is not prebuilt) and bind its function.

    `inner` is flashinfer.comm.trtllm_ar. Raises NotUnderstood with the reason.
    """
    wrapper = getattr(inner.get_trtllm_comm_module(), NAME)
    module, order = forwarded(wrapper)
    try:
        function = getattr(module, NAME)
    except AttributeError:
        raise NotUnderstood(f"the compiled module has no {NAME}") from None
    return Binding(function, order)


class _Recorder:
    """Stands for the compiled module; keeps what the wrapper calls it with."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: self.calls.append((name, args, kwargs))


def forwarded(wrapper: Any) -> tuple[Any, tuple[str, ...]]:
    """(the compiled module, the parameter names in the order in which the wrapper passes them on)."""
    if not isinstance(wrapper, types.FunctionType) or wrapper.__code__.co_freevars != ("module",):
        raise NotUnderstood(f"{NAME} is not a plain function around its compiled module")
    module = wrapper.__closure__[0].cell_contents  # type: ignore[index]
    recorder = _Recorder()
    twin = types.FunctionType(
        wrapper.__code__, wrapper.__globals__, NAME, wrapper.__defaults__, (types.CellType(recorder),)
    )
    marks = {name: object() for name in inspect.signature(wrapper).parameters}
    try:
        twin(**marks)
    except Exception as error:
        raise NotUnderstood(f"{NAME} does more than pass its arguments on ({error})") from None
    if len(recorder.calls) != 1 or recorder.calls[0][0] != NAME or recorder.calls[0][2]:
        raise NotUnderstood(f"{NAME} does not make exactly one positional call of its compiled function")
    names = {id(mark): name for name, mark in marks.items()}
    order = tuple(names.get(id(value), "") for value in recorder.calls[0][1])
    check_order(order)
    return module, order


def check_order(order: tuple[str, ...]) -> None:
    """Raise NotUnderstood unless every argument is one that this package knows how to fill."""
    missing = NEEDED - set(order)
    unknown = set(order) - NEEDED - {*UNUSED, "weight_bias"}
    if missing or unknown or len(set(order)) != len(order):
        raise NotUnderstood(f"{NAME} passes on {order}; missing {sorted(missing)}, unknown {sorted(unknown)}")
