"""PartialSum: no way to use it but to complete it, once."""

import copy

import numpy as np
import paddle
import pytest

from fastdeploy_fusion import AllReduceFusion
from fastdeploy_fusion.errors import FusionError


@pytest.fixture
def fusion():
    with AllReduceFusion.open(hidden_size=4) as opened:
        yield opened


USES = {
    "add": lambda p, x: p + x,
    "radd": lambda p, x: x + p,
    "subtract": lambda p, x: x - p,
    "multiply": lambda p, x: p * 2,
    "matmul": lambda p, x: p @ x,
    "paddle function": lambda p, x: paddle.nn.functional.silu(p),
    "paddle binary": lambda p, x: paddle.add(x, p),
    "concat": lambda p, x: paddle.concat([x, p]),
    "numpy": lambda p, x: np.asarray(p),
    "index": lambda p, x: p[0],
    "iterate": lambda p, x: list(p),
    "equal": lambda p, x: p == x,
    "unequal": lambda p, x: p != x,
    "less": lambda p, x: p < 1,
    "power": lambda p, x: p**2,
    "contains": lambda p, x: 1.0 in p,
    "truth": lambda p, x: bool(p),
    "length": lambda p, x: len(p),
    "to_tensor": lambda p, x: paddle.to_tensor(p),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES.keys())
def test_any_other_use_raises(fusion, use):
    x = paddle.ones([4, 4])
    with pytest.raises((TypeError, ValueError)):
        use(fusion.partial(paddle.ones([4, 4])), x)


def test_arithmetic_says_what_to_do(fusion):
    with pytest.raises(TypeError, match=r"Give it to RMSNorm, or call complete\(\)"):
        fusion.partial(paddle.ones([1, 4])) + 1


def test_it_shows_shape_and_dtype(fusion):
    partial = fusion.partial(paddle.ones([3, 4]))
    assert list(partial.shape) == [3, 4] and partial.dtype == paddle.float32
    assert "PartialSum(shape=" in repr(partial)


def test_it_is_consumed_once(fusion):
    partial = fusion.partial(paddle.ones([1, 4]))
    partial.complete()
    for use in (partial.complete, partial.take, lambda: partial.shape):
        with pytest.raises(FusionError, match="already consumed"):
            use()
    assert "consumed" in repr(partial)


def test_a_copy_of_the_reference_is_not_a_second_sum(fusion):
    partial = fusion.partial(paddle.ones([1, 4]))
    alias = partial
    alias.complete()
    with pytest.raises(FusionError):
        copy.copy(partial).complete()
