"""The few operations that layers share, right on every device.

Paddle's CPU build has no 16-bit matmul, add or softmax. So on CPU 16-bit operands are widened, computed in float32 and
the result is rounded once to the activation's dtype.
"""

import ctypes
import math
from typing import Any

import numpy as np
import paddle
import paddle.nn.functional as F

from ..backends.host_memory import HostViews, outputs

_activations, _weights = HostViews(), HostViews()


def widen(tensor: Any) -> Any:
    """The tensor in a dtype that its device can compute in: float32 on CPU, its own elsewhere."""
    if tensor.dtype == paddle.float32 or not tensor.place.is_cpu_place():
        return tensor
    return tensor.astype("float32")


def linear(x: Any, weight: Any, bias: Any = None) -> Any:
    """``x @ weight.T + bias`` for ``x [..., in]`` and ``weight [out, in]``; the result has the dtype of ``x``."""
    if x.place.is_cpu_place():
        if x.dtype == weight.dtype == paddle.float32 and (bias is None or bias.dtype == paddle.float32):
            return _host_linear(x, weight, bias)
        wide_bias = None if bias is None else cast(bias, paddle.float32)
        return cast(_host_linear(cast(x, paddle.float32), cast(weight, paddle.float32), wide_bias), x.dtype)
    out = paddle.matmul(x, cast(weight, x.dtype), transpose_y=True)
    return out if bias is None else out + cast(bias, x.dtype)


def host_array(tensor: Any) -> np.ndarray:
    """A float32 CPU tensor's memory as an array of the same shape; it is valid while the tensor lives."""
    if not tensor.is_contiguous():
        return np.from_dlpack(tensor)
    shape = tensor.shape
    return _activations.of(tensor, math.prod(shape[:-1]), shape[-1]).reshape(shape)


def tensor_of(values: Any, place: Any = None) -> Any:
    """A new tensor of host values: float32 arrays stay so, all else becomes int64. ``place`` None: Paddle's device.

    Not ``paddle.to_tensor``, which in Paddle 3.3 loses some 100 bytes of memory a call (gigabytes a day in a busy
    server) and takes three times as long.
    """
    is_float = getattr(values, "dtype", None) == np.float32
    array = np.ascontiguousarray(values, np.float32 if is_float else np.int64)
    dtype = paddle.float32 if is_float else paddle.int64
    out = paddle._C_ops.empty(list(array.shape), dtype, paddle.CPUPlace())
    ctypes.memmove(out.data_ptr(), array.ctypes.data, array.nbytes)
    place = paddle.framework._current_expected_place() if place is None else place
    return out if place.is_cpu_place() else out._copy_to(place, True)


def host_empty(shape: list[int]) -> Any:
    """An uninitialised float32 CPU tensor."""
    return outputs.empty(shape[0], math.prod(shape[1:])).reshape(shape)


def _host_linear(x: Any, weight: Any, bias: Any) -> Any:
    """numpy's BLAS over the tensors' own memory: on processors that are not Intel's, Paddle's takes up to five times as
    long from 8 rows on; for one row both wait for memory.
    """
    out_size, in_size = weight.shape
    leading = x.shape[:-1]
    num_rows = math.prod(leading)  # Tensor.size costs 10 us
    if num_rows == 0:
        return paddle.empty([*leading, out_size], dtype=paddle.float32)
    out = outputs.empty(num_rows, out_size)
    rows = _activations.of(out, num_rows, out_size)
    if not x.is_contiguous():
        x = x.contiguous()
    weight = weight if weight.is_contiguous() else weight.contiguous()
    np.matmul(_activations.of(x, num_rows, in_size), _weights.of(weight, out_size, in_size).T, out=rows)
    if bias is not None:
        rows += _weights.of(bias if bias.is_contiguous() else bias.contiguous(), 1, out_size)
    return out if len(leading) == 1 else out.reshape([*leading, out_size])


def per_head(x: Any, weight: Any, *, transpose: bool = False) -> Any:
    """Each head through its own matrix: ``x [rows, heads, n]`` and ``weight [heads, n, m]`` to ``[rows, heads, m]``.

    ``transpose``: the weight is ``[heads, m, n]``. The result has the dtype of ``x``.
    """
    if not x.place.is_cpu_place():
        out = paddle.matmul(x.transpose([1, 0, 2]), cast(weight, x.dtype), transpose_y=transpose)
        return out.transpose([1, 0, 2])
    wide_x, wide_weight = cast(x, paddle.float32), cast(weight, paddle.float32)
    matrices = host_array(wide_weight)
    matrices = matrices.swapaxes(1, 2) if transpose else matrices
    out = host_empty([x.shape[0], x.shape[1], matrices.shape[2]])
    np.matmul(host_array(wide_x).swapaxes(0, 1), matrices, out=host_array(out).swapaxes(0, 1))
    return cast(out, x.dtype)


def add(x: Any, y: Any) -> Any:
    """``x + y`` in the dtype of ``x``."""
    wide_x = widen(x)
    return cast(wide_x + cast(y, wide_x.dtype), x.dtype)


def swiglu(x: Any) -> Any:
    """``silu(x[..., :n]) * x[..., n:]`` for ``x [..., 2n]``, in the dtype of ``x``."""
    return F.swiglu(x) if x.dtype == paddle.float32 else cast(F.swiglu(widen(x)), x.dtype)


def squared_relu(x: Any) -> Any:
    """``max(x, 0) ** 2``, in the dtype of ``x``."""
    positive = F.relu(widen(x))
    return cast(positive * positive, x.dtype)


def cast(tensor: Any, dtype: Any) -> Any:
    """The tensor in ``dtype``; itself when it has that already."""
    return tensor if tensor.dtype == dtype else tensor.astype(dtype)
