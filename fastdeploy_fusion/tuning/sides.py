"""What is compared: the fused call, the same sum without the norm in it, and the plain way, on equal tensors."""

from collections.abc import Callable
from typing import Any

import numpy as np
import paddle

from ..backends import plain
from ..fusion import AllReduceFusion
from ..host_values import from_numpy

EPS = 1e-6
SCALE = 1e-3
"""Small values: sums in place of many calls stay finite for longer."""

Call = Callable[[], Any]


def make(
    fusion: AllReduceFusion, pattern: str, tokens: int, dtype: str, collective: str
) -> tuple[dict[str, Call], str]:
    """``({"fused": .., "pure": .., "plain": ..}, how the plain side works)``; a call's operands live as long as it.

    fused: ``fusion``'s own call. pure (add_rms_norm only): the fused workspace's sum, then addition and norm. plain: a
    library's collective, then addition and norm. On a CPU they are what this library would run. On a GPU the norm is
    one fused kernel, as an engine has it. Collective: every rank makes the same ones.
    """
    hidden = fusion.state.hidden_size
    rng = np.random.default_rng(fusion.rank)
    partial, residual = (_tensor(rng, (tokens, hidden), dtype) for _ in range(2))
    weight = from_numpy(np.ones(hidden, np.float32), dtype)
    if not partial.place.is_cpu_place():
        yardstick = gpu().Yardstick(fusion.group.paddle_group, collective)
        return yardstick.sides(fusion, pattern, partial, residual, weight, EPS), yardstick.how
    if pattern == "all_reduce":
        return {
            "fused": lambda: fusion.all_reduce(partial),
            "plain": lambda: fusion.group.all_reduce(partial),
        }, "Paddle's all-reduce"
    unfused = plain.PlainBackend(fusion.group)

    def pure() -> Any:
        norm, total = plain.add_rms_norm(fusion.all_reduce(partial), residual, weight, EPS)
        return norm.astype(partial.dtype), total.astype(partial.dtype)

    return {
        "fused": lambda: fusion.add_rms_norm(partial, residual, weight, EPS),
        "pure": pure,
        "plain": lambda: unfused.add_rms_norm(partial, residual, weight, EPS),
    }, "Paddle's all-reduce, then addition and norm in numpy"


def _tensor(rng: np.random.Generator, shape: tuple[int, int], dtype: str) -> Any:
    rows = rng.standard_normal((min(shape[0], 64), shape[1]), np.float32) * SCALE
    return from_numpy(np.resize(rows, shape), dtype)


def gpu() -> Any:
    """The module that knows how to compare on a GPU; None on a CPU."""
    if not str(paddle.device.get_device()).startswith("gpu"):
        return None
    from ..backends.flashinfer import yardstick

    return yardstick
