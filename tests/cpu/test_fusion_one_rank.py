"""One rank: the same API, nothing to reduce, operands checked as anywhere."""

import numpy as np
import paddle
import pytest

from fastdeploy_fusion import AllReduceFusion, FusionConfig, reference
from fastdeploy_fusion.errors import WorkspaceError
from fastdeploy_fusion.host_values import from_numpy, to_float64
from fastdeploy_fusion.policy import Reason


@pytest.fixture
def fusion():
    with AllReduceFusion.open(FusionConfig(enabled=True), hidden_size=8) as opened:
        yield opened


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("num_tokens", [1, 3])
def test_it_equals_the_reference(fusion, dtype, num_tokens):
    rng = np.random.default_rng(num_tokens)
    x, residual = (from_numpy(rng.standard_normal((num_tokens, 8), np.float32), dtype) for _ in range(2))
    weight = from_numpy(rng.standard_normal(8, np.float32), dtype)
    norm, total = fusion.add_rms_norm(x, residual, weight, 1e-5)
    want = reference.add_rms_norm([to_float64(x)], to_float64(residual), to_float64(weight), 1e-5)
    tolerance = {"float32": 1e-6, "bfloat16": 8e-3, "float16": 1e-3}[dtype]
    np.testing.assert_allclose(to_float64(norm), want[0], rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(to_float64(total), want[1], rtol=tolerance, atol=tolerance)
    assert norm.dtype == x.dtype and total.dtype == x.dtype


def test_large_float16_values_do_not_overflow(fusion):
    x = from_numpy(np.full((1, 8), 300.0, np.float32), "float16")
    norm, _ = fusion.add_rms_norm(x, None, paddle.ones([8], "float16"), 1e-5)
    np.testing.assert_allclose(to_float64(norm), 1.0, atol=1e-3)


def test_it_explains_itself(fusion):
    assert fusion.explain([1, 8]).reason is Reason.ONE_RANK
    assert not fusion.defers(marked=True)


@pytest.mark.parametrize("dtype", ["float64", "int64", "int32"])
def test_other_dtypes_are_refused(fusion, dtype):
    x = paddle.ones([2, 8]).astype(dtype)
    with pytest.raises(TypeError, match=f"input is paddle.{dtype}; it must be one of float32"):
        fusion.add_rms_norm(x, None, paddle.ones([8]), 1e-5)


def test_a_weight_of_the_wrong_length_is_refused(fusion):
    with pytest.raises(ValueError, match=r"weight is \S*\[7\]"):
        fusion.add_rms_norm(paddle.ones([2, 8]), None, paddle.ones([7]), 1e-5)


def test_a_residual_of_another_shape_is_refused(fusion):
    with pytest.raises(ValueError, match="residual is .* they must be equal"):
        fusion.add_rms_norm(paddle.ones([2, 8]), paddle.ones([1, 8]), paddle.ones([8]), 1e-5)


def test_a_residual_of_another_dtype_is_refused(fusion):
    with pytest.raises(TypeError, match="residual is .*cast"):
        fusion.add_rms_norm(paddle.ones([2, 8]), paddle.ones([2, 8], "float16"), paddle.ones([8]), 1e-5)


def test_no_tokens(fusion):
    norm, total = fusion.add_rms_norm(paddle.ones([0, 8]), paddle.ones([0, 8]), paddle.ones([8]), 1e-5)
    assert list(norm.shape) == [0, 8] and list(total.shape) == [0, 8]


def test_operands_are_not_written(fusion):
    x, residual = paddle.ones([2, 8]), paddle.full([2, 8], 2.0)
    fusion.add_rms_norm(x, residual, paddle.ones([8]), 1e-5)
    assert float(x.sum()) == 16.0 and float(residual.sum()) == 32.0


def test_closed_means_closed():
    fusion = AllReduceFusion.open(hidden_size=8)
    fusion.close()
    fusion.close()
    with pytest.raises(WorkspaceError, match="closed"):
        fusion.explain([1, 8])


def test_a_bad_size_or_dtype_is_refused_at_open():
    with pytest.raises(ValueError, match="hidden_size is 0"):
        AllReduceFusion.open(hidden_size=0)
    with pytest.raises(ValueError, match="dtype is 'float64'"):
        AllReduceFusion.open(hidden_size=8, dtype="float64")
