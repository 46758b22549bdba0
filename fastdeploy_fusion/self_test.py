"""The check that a new workspace must pass before traffic: random rows through it, judged by the reference."""

from typing import Any

import numpy as np

from . import reference
from .backends import Backend, WorkspacePlan
from .host_values import from_numpy, to_float64

_NUM_TOKENS = (1, 3)
_EPS = 1e-5
_TOLERANCE = {"float32": 1e-5, "bfloat16": 1.6e-2, "float16": 2e-3}
"""Relative to the largest value: two units in the last place of the dtype, and float32's summation order."""


def run(backend: Backend, rank: int, plan: WorkspacePlan) -> None:
    """Both operations against the reference. Collective.

    Raises:
        ArithmeticError: a result is not finite, or too far from the reference; it says which and by how much.
    """
    for num_tokens in _NUM_TOKENS:
        if num_tokens > plan.num_max_tokens:
            continue
        shape = (num_tokens, plan.hidden_size)
        partials = [_random(shape, 1 + other, plan.dtype) for other in range(plan.world_size)]
        residual, weight = _random(shape, 101, plan.dtype), _random(shape[1:], 102, plan.dtype)
        bias = 1.0 if backend.takes_weight_bias else 0.0
        norm, total = reference.add_rms_norm(partials, residual, weight, _EPS, bias)
        x, r, w = (from_numpy(array, plan.dtype) for array in (partials[rank], residual, weight))
        norm_out, residual_out = backend.add_rms_norm(x, r, w, _EPS, bias)
        _check("add_rms_norm's residual", residual_out, total, plan)
        _check("add_rms_norm's norm", norm_out, norm, plan)
        summed = np.sum(np.stack(partials).astype(np.float64), axis=0)
        _check("all_reduce", backend.all_reduce(x), summed, plan)


def _random(shape: tuple[int, ...], seed: int, dtype: str) -> np.ndarray:
    """The same values on every rank, exact in ``dtype``, without touching anybody's random state."""
    values = np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)
    # Six mantissa bits survive in every dtype.
    mantissa, exponent = np.frexp(values)
    return np.ldexp(np.round(mantissa * 64) / 64, exponent).astype(np.float32)


def _check(what: str, tensor: Any, expected: np.ndarray, plan: WorkspacePlan) -> None:
    if tensor is None:
        raise ArithmeticError(f"self-test: {what} returned nothing")
    got = to_float64(tensor)
    if not np.isfinite(got).all():
        raise ArithmeticError(f"self-test: {what} of {list(expected.shape)} {plan.dtype} is not finite")
    error = np.abs(got - expected).max() / np.abs(expected).max()
    if error > _TOLERANCE[plan.dtype]:
        raise ArithmeticError(
            f"self-test: {what} of {list(expected.shape)} {plan.dtype} is off by {error:.1e} of the largest value; "
            f"{_TOLERANCE[plan.dtype]:.1e} is allowed"
        )
