"""The few operations that layers share, right on every device.

Paddle's CPU build has no 16-bit matmul, add or softmax. So on CPU 16-bit operands are widened, computed in float32 and
the result is rounded once to the activation's dtype.
"""

from typing import Any

import paddle
import paddle.nn.functional as F


def widen(tensor: Any) -> Any:
    """The tensor in a dtype that its device can compute in: float32 on CPU, its own elsewhere."""
    if tensor.dtype == paddle.float32 or not tensor.place.is_cpu_place():
        return tensor
    return tensor.astype("float32")


def linear(x: Any, weight: Any, bias: Any = None) -> Any:
    """``x @ weight.T + bias`` for ``x [..., in]`` and ``weight [out, in]``; the result has the dtype of ``x``."""
    wide_x = widen(x)
    out = paddle.matmul(wide_x, cast(weight, wide_x.dtype), transpose_y=True)
    if bias is not None:
        out = out + cast(bias, out.dtype)
    return cast(out, x.dtype)


def add(x: Any, y: Any) -> Any:
    """``x + y`` in the dtype of ``x``."""
    wide_x = widen(x)
    return cast(wide_x + cast(y, wide_x.dtype), x.dtype)


def swiglu(x: Any) -> Any:
    """``silu(x[..., :n]) * x[..., n:]`` for ``x [..., 2n]``, in the dtype of ``x``."""
    return cast(F.swiglu(widen(x)), x.dtype)


def cast(tensor: Any, dtype: Any) -> Any:
    """The tensor in ``dtype``; itself when it has that already."""
    return tensor if tensor.dtype == dtype else tensor.astype(dtype)
