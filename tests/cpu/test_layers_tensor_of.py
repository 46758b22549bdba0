"""Host values as tensors: right, owned by nobody else, and nothing is kept of them."""

import gc

import numpy as np
import paddle
import pytest

from fastdeploy_fusion.layers import ops


@pytest.mark.parametrize(
    "values, dtype",
    [
        ([3, 1, 2], paddle.int64),
        ((), paddle.int64),
        (np.arange(12, dtype=np.int32).reshape(3, 4)[:, ::2], paddle.int64),
        (np.arange(6, dtype=np.float32).reshape(2, 3).T, paddle.float32),
    ],
)
def test_values_shapes_and_dtypes(values, dtype):
    tensor = ops.tensor_of(values)
    assert tensor.dtype == dtype and tensor.place.is_cpu_place() and tensor.shape == list(np.shape(values))
    assert (tensor.numpy() == np.asarray(values)).all()


def test_the_source_may_change_afterwards():
    source = np.array([1, 2])
    tensor = ops.tensor_of(source)
    source[:] = 7
    assert tensor.tolist() == [1, 2]


def test_no_call_leaves_anything_behind():
    ops.tensor_of([1])
    gc.collect()
    before = len(gc.get_objects())
    for _ in range(1000):
        ops.tensor_of([1, 2])
    gc.collect()
    assert len(gc.get_objects()) - before < 100  # paddle.to_tensor: 1,000
