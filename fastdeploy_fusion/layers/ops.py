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
    out = paddle.matmul(wide_x, _as_dtype(weight, wide_x.dtype), transpose_y=True)
    if bias is not None:
        out = out + _as_dtype(bias, out.dtype)
    return _as_dtype(out, x.dtype)


def add(x: Any, y: Any) -> Any:
    """``x + y`` in the dtype of ``x``."""
    wide_x = widen(x)
    return _as_dtype(wide_x + _as_dtype(y, wide_x.dtype), x.dtype)


def swiglu(x: Any) -> Any:
    """``silu(x[..., :n]) * x[..., n:]`` for ``x [..., 2n]``, in the dtype of ``x``."""
    return _as_dtype(F.swiglu(widen(x)), x.dtype)


def rms_norm(x: Any, weight: Any, eps: float) -> Any:
    """RMSNorm over the last axis, computed in float32, rounded once to the dtype of ``x``.

    Written out on purpose: Paddle 3.3's fused CPU kernel kills the process (SIGILL) on CPUs without AVX-512.
    """
    wide = _as_dtype(x, paddle.float32)
    scale = paddle.rsqrt((wide * wide).mean(-1, keepdim=True) + eps)
    return _as_dtype(wide * scale * _as_dtype(weight, paddle.float32), x.dtype)


def _as_dtype(tensor: Any, dtype: Any) -> Any:
    return tensor if tensor.dtype == dtype else tensor.astype(dtype)
