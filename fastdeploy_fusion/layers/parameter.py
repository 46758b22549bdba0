"""Weights of a layer: where they live, which part of which checkpoint tensor fills them, and how to write them."""

import contextlib
import ctypes
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import paddle
from paddle import nn
from paddle.base.framework import EagerParamBase

Index = tuple[slice | int, ...]
_without_memory: ContextVar[bool] = ContextVar("without_memory", default=False)

NUMPY_DTYPES: dict[str, np.dtype] = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}


@dataclass(frozen=True, eq=False)
class TensorSpec:
    """One tensor of the checkpoint that a layer needs.

    ``key``: its name there. ``shape``: its full shape there. ``param[dst]`` takes ``stored[src]``, with ``src`` one
    slice a dimension. ``param`` is None when the tensor must exist but this rank keeps nothing of it (a bias that only
    rank 0 adds).
    """

    key: str
    shape: tuple[int, ...]
    param: Any
    dst: Index
    src: tuple[slice, ...]


class WeightedLayer(nn.Layer):
    """A layer with weights. ``checkpoint_tensors()`` lists what it and everything below it need, in module order."""

    def own_tensors(self) -> list[TensorSpec]:
        """The tensors of this layer alone; layers with weights override it."""
        return []

    def checkpoint_tensors(self) -> list[TensorSpec]:
        """Every stored tensor that this layer and its sublayers need on this rank. Keys are equal on all ranks."""
        layers: Iterator[Any] = iter(self.sublayers(include_self=True))
        return [spec for layer in layers if isinstance(layer, WeightedLayer) for spec in layer.own_tensors()]


@dataclass(eq=False)
class Outline:
    """Stands for a parameter where a model is built only to be looked at: its shape, and no memory."""

    shape: list[int]
    dtype: str


@contextlib.contextmanager
def without_memory() -> Iterator[None]:
    """Layers that are built inside get ``Outline``s for parameters: they can be walked through, not run or loaded."""
    before = _without_memory.set(True)
    try:
        yield
    finally:
        _without_memory.reset(before)


def empty_parameter(shape: list[int], dtype: str) -> Any:
    """A parameter of that shape with unset values, on the current device, without running any kernel."""
    if _without_memory.get():
        return Outline(shape, dtype)
    return EagerParamBase.from_tensor(paddle.empty(shape, dtype=dtype), trainable=False)


def dtype_name(tensor: Any) -> str:
    """``float32``, ``bfloat16``, ... of a Paddle tensor."""
    return str(tensor.dtype).rpartition(".")[2]


def host_view(param: Any) -> np.ndarray:
    """A writable numpy array over the memory of a CPU parameter (bfloat16 as ``ml_dtypes.bfloat16``).

    It is valid as long as ``param`` is; let go of it soon.
    """
    dtype = NUMPY_DTYPES[dtype_name(param)]
    nbytes = param.size * dtype.itemsize
    memory = (ctypes.c_char * nbytes).from_address(param.data_ptr()) if nbytes else b""
    return np.frombuffer(memory, dtype=dtype).reshape(param.shape)


def write_parameter(param: Any, index: Index, values: np.ndarray) -> None:
    """``param[index] = values``, converted to the parameter's dtype; on CPU straight into its memory."""
    if param.place.is_cpu_place():
        convert_into(host_view(param)[index], values)
        return
    staged = np.empty(values.shape, NUMPY_DTYPES[dtype_name(param)])
    convert_into(staged, values)
    raw = staged.view(np.uint16) if dtype_name(param) == "bfloat16" else staged
    param[index] = paddle.to_tensor(raw, place=param.place)


def convert_into(out: np.ndarray, values: np.ndarray) -> None:
    """``out[...] = values`` between float32, float16 and bfloat16; widening bfloat16 is a shift, exact and fast."""
    if out.dtype == np.float32 and values.dtype == NUMPY_DTYPES["bfloat16"]:
        widened: Any = values.view(np.uint16).astype(np.uint32)
        widened <<= 16
        out[...] = widened.view(np.float32)
    else:
        out[...] = values
