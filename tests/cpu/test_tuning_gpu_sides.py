"""The GPU's yardstick with everything that needs a GPU replaced: the sides it makes, and what each of them calls."""

from types import SimpleNamespace

import numpy as np
import paddle
import pytest

from fastdeploy_fusion.backends.flashinfer import detect, yardstick

EPS = 1e-6


@pytest.fixture
def calls(monkeypatch):
    made = []

    def fused_rms_norm(x, weight, bias, eps, begin_norm_axis, residual):
        made.append(("norm", float(x.numpy()[0, 0])))
        return x, residual

    def all_reduce(tensor, group, sync_op, use_calc_stream):
        made.append(("collective", group))

    monkeypatch.setattr(paddle.incubate.nn.functional, "fused_rms_norm", fused_rms_norm)
    monkeypatch.setattr(paddle.distributed.stream, "all_reduce", all_reduce)
    monkeypatch.setattr(detect, "find_way", lambda: (SimpleNamespace(kind="proxy", torch=None), ""))
    return made


class Fusion:
    def __init__(self, made):
        self.made = made

    def add_rms_norm(self, partial, residual, weight, eps, weight_bias=0.0):
        self.made.append(("fused", None))

    def all_reduce(self, partial):
        self.made.append(("sum", None))
        return partial * 2


def make(calls, pattern, dtype="float32"):
    x = paddle.to_tensor(np.full((3, 8), 1.0, np.float32)).astype(dtype)
    stick = yardstick.Yardstick("the group", "paddle")
    assert stick.how == "NCCL all-reduce of paddle, then Paddle's fused_rms_norm, in place"
    return stick.sides(Fusion(calls), pattern, x, x, paddle.ones([8]), EPS)


@pytest.mark.parametrize(
    ("side", "expected"),
    [
        ("fused", [("fused", None)]),
        ("pure", [("sum", None), ("norm", 2.0)]),
        ("plain", [("collective", "the group"), ("norm", 1.0)]),
    ],
)
def test_norm_sides(calls, side, expected):
    sides = make(calls, "add_rms_norm")
    assert list(sides) == ["fused", "pure", "plain"]
    sides[side]()
    assert calls == expected


def test_sum_sides(calls):
    sides = make(calls, "all_reduce")
    for call in sides.values():
        call()
    assert calls == [("sum", None), ("collective", "the group")]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_copies_keep_the_dtype_and_the_bits(dtype):
    x = paddle.to_tensor(np.linspace(-3, 3, 24, dtype=np.float32)).astype(dtype)
    copy = yardstick._copy(x)
    assert copy.dtype == x.dtype and copy.data_ptr() != x.data_ptr()
    assert (copy.numpy() == x.numpy()).all()
