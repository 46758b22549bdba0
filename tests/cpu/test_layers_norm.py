"""RMSNorm on complete tensors, and what it does with a sum that is still owed."""

import numpy as np
import pytest

from fastdeploy_fusion.layers import RMSNorm
from tests.fake_tp import FakeTp, array, draw, fill, tensor

EPS = 1e-5
TOLERANCE = {"float32": 1e-6, "bfloat16": 2**-8, "float16": 2**-11}


def expected(x, weight):
    x = x.astype(np.float64)
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + EPS) * weight


@pytest.mark.parametrize("num_tokens", [0, 1, 5])
@pytest.mark.parametrize("weight_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_norm_and_residual_are_right_whatever_the_dtypes(dtype, weight_dtype, num_tokens):
    norm = RMSNorm(24, EPS, prefix="n", dtype=weight_dtype)
    fill(norm)
    x, residual = tensor(draw(num_tokens, 24), dtype), tensor(draw(num_tokens, 24, seed=2), dtype)
    out, residual_out = norm(x, residual)
    total = (array(x) + array(residual)).astype(np.float32)
    assert str(out.dtype) == str(residual_out.dtype) == f"paddle.{dtype}"
    np.testing.assert_allclose(array(residual_out), total, rtol=TOLERANCE[dtype], atol=1e-6)
    np.testing.assert_allclose(array(out), expected(total, array(norm.weight)), rtol=TOLERANCE[dtype], atol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gemmas_weights_are_stored_less_one(dtype):
    norm = RMSNorm(24, EPS, prefix="n", dtype=dtype, weight_bias=1.0)
    fill(norm)
    x = tensor(draw(3, 24), dtype)
    want = expected(array(x).astype(np.float32), array(norm.weight).astype(np.float64) + 1)
    np.testing.assert_allclose(array(norm(x)[0]), want, rtol=TOLERANCE[dtype], atol=1e-6)


def test_without_a_residual_the_input_is_handed_on():
    norm = RMSNorm(8, EPS, prefix="n")
    fill(norm)
    x = tensor(draw(3, 8))
    out, residual_out = norm(x)
    assert residual_out is x
    np.testing.assert_allclose(array(out), expected(array(x), array(norm.weight)), rtol=1e-5, atol=1e-6)


def test_small_values_keep_the_epsilon_and_large_ones_do_not_overflow_in_float16():
    norm = RMSNorm(4, EPS, prefix="n", dtype="float16")
    fill(norm, {"n.weight": np.ones(4, np.float32)})
    np.testing.assert_array_equal(array(norm(tensor(np.zeros((1, 4)), "float16"))[0]), 0.0)
    np.testing.assert_allclose(array(norm(tensor(np.full((1, 4), 3e4), "float16"))[0]), 1.0, rtol=1e-3)


def test_an_owed_sum_goes_to_tp_once_with_its_residual():
    tp = FakeTp(0, 2, defers=True)
    norm = RMSNorm(8, EPS, tp=tp, prefix="n")
    share, residual = tensor(draw(3, 8)), tensor(draw(3, 8, seed=2))
    norm(tp.partial(share), residual)
    assert tp.normed == [(share, residual)]
    assert not tp.reduced


@pytest.mark.parametrize("num_tokens", [1, 2])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_without_epsilon_a_row_of_zeros_is_undefined_and_harms_no_other(num_tokens):
    norm = RMSNorm(4, 0.0, prefix="n")
    fill(norm, {"n.weight": np.ones(4, np.float32)})
    rows = np.zeros((num_tokens, 4))
    rows[1:] = 3.0
    out = array(norm(tensor(rows))[0])
    assert np.isnan(out[0]).all() and (out[1:] == 1).all()


def test_leading_axes_are_kept():
    norm = RMSNorm(4, EPS, prefix="n")
    fill(norm)
    x = tensor(draw(2, 3, 4))
    np.testing.assert_allclose(array(norm(x)[0]), expected(array(x), array(norm.weight)), rtol=1e-5, atol=1e-6)


def test_wrong_sizes_are_refused_with_both_numbers():
    norm = RMSNorm(8, EPS, prefix="model.norm")
    with pytest.raises(ValueError, match=r"last axis of x is 6.*'model.norm.weight' is over 8"):
        norm(tensor(draw(2, 6)))
    with pytest.raises(ValueError, match=r"residual \[3, 8\] and x \[2, 8\]"):
        norm(tensor(draw(2, 8)), tensor(draw(3, 8)))
    with pytest.raises(ValueError, match="must be positive"):
        RMSNorm(0, EPS, prefix="n")
