"""Values cross between numpy and Paddle rounded to nearest even, NaN and infinities included."""

import numpy as np
import pytest

from fastdeploy_fusion import host_values

ODD = np.array([[0.0, -0.0, np.inf, -np.inf, np.nan, 1e-40, 65504.0, 1 + 2**-8, 1 + 3 * 2**-8]], np.float32)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_there_and_back(dtype):
    tensor = host_values.from_numpy(ODD, dtype)
    assert str(tensor.dtype).endswith(dtype) and tensor.shape == [1, 9]
    back = host_values.to_float64(tensor)
    assert np.array_equal(np.signbit(back[0, :4]), [False, True, False, True]) and np.isnan(back[0, 4])
    if dtype == "bfloat16":
        assert back[0, 7:].tolist() == [1.0, 1 + 2**-6]  # ties go to the even neighbour
    else:
        assert back[0, 6:].tolist() == [65504.0, 1 + 2**-8, 1 + 3 * 2**-8]


def test_every_bfloat16_survives():
    bits = np.arange(1 << 16, dtype=np.uint16)
    again = host_values.to_bits(host_values.from_bits(bits), "bfloat16")
    is_nan = np.isnan(host_values.from_bits(bits))
    assert np.array_equal(again[~is_nan], bits[~is_nan]) and np.isnan(host_values.from_bits(again[is_nan])).all()


def test_what_is_not_contiguous_is_copied():
    values = np.arange(12, dtype=np.float32).reshape(3, 4).T
    assert np.array_equal(host_values.from_bits(host_values.to_bits(values, "bfloat16")), values)
