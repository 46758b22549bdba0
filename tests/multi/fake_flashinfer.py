"""A FlashInfer for CPUs: its unified API, its compiled function as a real TVM-FFI function over host memory.

What is real: the backend, the group's channel, TVM-FFI and the way in which Paddle's tensors get into it.
What is not: FlashInfer's package, the GPU driver, and the kernel, which is numpy here.
"""

import ctypes
from types import SimpleNamespace
from typing import Any

import numpy as np
import paddle

from fastdeploy_fusion.backends.flashinfer import api, driver, paddle_side
from fastdeploy_fusion.backends.flashinfer.detect import Way
from fastdeploy_fusion.host_values import to_bits

STREAM = 4242
ORDER = (
    "allreduce_in", "world_size", "world_rank", "token_num", "hidden_dim", "workspace_ptrs", "launch_with_pdl",
    "use_oneshot", "trigger_completion_at_end", "fp32_acc", "pattern_code", "allreduce_out", "residual_in",
    "residual_out", "norm_out", "quant_out", "scale_out", "rms_gamma", "rms_eps", "scale_factor", "layout_code",
    "block_quant_group_size", "weight_bias",
)  # fmt: skip


def _memory(tensor: Any, shape: tuple[int, ...]) -> tuple[np.ndarray, bool]:
    """Host memory of a TVM-FFI tensor, whatever device it claims to be on; whether it is bfloat16, as its bits."""
    assert tuple(tensor.shape) == shape, (tensor.shape, shape)
    name = str(tensor.dtype)
    kind = np.dtype("uint16" if name == "bfloat16" else name)
    buffer = (ctypes.c_char * (int(np.prod(shape)) * kind.itemsize)).from_address(tensor.data_ptr())
    return np.frombuffer(buffer, kind).reshape(shape), name == "bfloat16"


def read(tensor: Any, shape: tuple[int, ...]) -> np.ndarray:
    memory, bits = _memory(tensor, shape)
    return (memory.astype("uint32") << 16).view("float32") if bits else memory.astype("float32")


def write(tensor: Any, values: np.ndarray) -> np.ndarray:
    """Store float32 values; what was stored, as float32."""
    memory, bits = _memory(tensor, values.shape)
    memory[:] = to_bits(values, "bfloat16") if bits else values
    return read(tensor, values.shape)


def env_stream() -> int:
    import tvm_ffi

    core = tvm_ffi.core
    stream = core._env_set_current_stream(2, 0, 0)
    core._env_set_current_stream(2, 0, stream)
    return int(stream or 0)


class FakeFlashInfer:
    """One rank's. `calls` holds the arguments of each kernel launch; `freed` the addresses given back."""

    def __init__(self, group: Any, fault: str = "") -> None:
        import tvm_ffi

        self.group, self.fault = group, fault
        self.calls: list[dict[str, Any]] = []
        self.public_calls = 0
        self.freed: list[int] = []
        self.barriers: list[str] = []
        self.kernel = tvm_ffi.convert(self._kernel)
        module = SimpleNamespace(trtllm_allreduce_fusion=self.kernel)
        self.inner = SimpleNamespace(get_trtllm_comm_module=lambda: _wrapped(module))
        self.comm = SimpleNamespace(
            trtllm_ar=self.inner,
            create_allreduce_fusion_workspace=self._create,
            allreduce_fusion=self._public,
            trtllm_destroy_ipc_workspace_for_all_reduce_fusion=lambda handles, group=None: None,
        )

    def way(self) -> Way:
        found = api.Api(api.KIND_UNIFIED, has_weight_bias=True, has_trigger=True, wide_float32=False)
        dtypes = SimpleNamespace(float32="float32", float16="float16", bfloat16="bfloat16")
        return Way("proxy", "0.0", self.comm, dtypes, found, None)

    def _create(self, *, comm_backend: Any, rank: int, world_size: int, **settings: Any) -> Any:
        assert (comm_backend.Get_rank(), comm_backend.Get_size()) == (rank, world_size)
        if self.fault == "early":
            raise MemoryError("no memory for the first buffer")
        assert comm_backend.allgather(b"handle%d" % rank) == tuple(b"handle%d" % r for r in range(world_size))
        if self.fault == "middle":
            raise MemoryError("no memory for the second buffer")
        assert comm_backend.bcast(rank + 10, root=1) == 11
        comm_backend.barrier()
        table = paddle.to_tensor(np.arange(100, 101 + 3 * world_size, dtype="int64"))
        return SimpleNamespace(
            ipc_handles=[[1], [2], [3]], workspace_tensor=table, mem_handles=[], destroy=lambda: None, settings=settings
        )

    def _kernel(self, *args: Any) -> None:
        given = dict(zip(ORDER, args, strict=True))
        pointers = [given[n].data_ptr() for n in ("allreduce_in", "residual_in", "rms_gamma") if given[n] is not None]
        self.calls.append(given | {"stream": env_stream(), "pointers": pointers})
        shape = (given["token_num"], given["hidden_dim"])
        total = self._sum(read(given["allreduce_in"], shape))
        if given["pattern_code"] == 0:
            write(given["allreduce_out"], total)
            return
        # The kernel rounds the sum before it adds the residual; residual_out is free to be written twice.
        total = write(given["residual_out"], total) + read(given["residual_in"], shape)
        total = write(given["residual_out"], total)
        weight = read(given["rms_gamma"], shape[1:]) + np.float32(given["weight_bias"])
        norm = total / np.sqrt((total**2).mean(-1, keepdims=True) + given["rms_eps"]) * weight
        if self.fault == "wrong":
            norm[0, 0] += len(self.calls)
        write(given["norm_out"], norm)

    def _sum(self, partial: np.ndarray) -> np.ndarray:
        parts = self.group.all_gather_object(partial.tobytes(), "fake kernel")
        return np.sum([np.frombuffer(part, "float32").reshape(partial.shape) for part in parts], 0, "float32")

    def _public(self, *, input: Any, workspace: Any, pattern: int, **given: Any) -> None:
        import tvm_ffi

        self.public_calls += 1
        tensors = {"allreduce_in": input, "allreduce_out": given.get("output")}
        tensors["workspace_ptrs"] = workspace.workspace_tensor
        tensors |= {name: given.get(name) for name in ("residual_in", "residual_out", "norm_out", "rms_gamma")}
        views = {n: t if t is None else tvm_ffi.from_dlpack(paddle_side.capsule(t)) for n, t in tensors.items()}
        values = given | views | {"token_num": input.shape[0], "hidden_dim": input.shape[1], "pattern_code": pattern}
        self.kernel(*[values.get(name) for name in ORDER])

    def replace_driver(self) -> None:
        """The GPU driver's calls, on host memory."""
        driver.make_current = lambda index: None
        driver.synchronize = lambda: None
        driver.is_capturing = lambda stream: False
        driver.free = self.freed.append
        driver.read_words = lambda pointer, count: list((ctypes.c_uint64 * count).from_address(pointer))
        paddle_side.stream_reader = lambda index: lambda: STREAM


def _wrapped(module: Any) -> Any:
    """FlashInfer's wrapper around its compiled module, as 0.6.12 to 0.7.4 have it."""

    def trtllm_allreduce_fusion(
        allreduce_in, world_size, world_rank, token_num, hidden_dim, workspace_ptrs, launch_with_pdl, use_oneshot,
        trigger_completion_at_end, fp32_acc, pattern_code, allreduce_out, residual_in, residual_out, norm_out,
        quant_out, scale_out, rms_gamma, rms_eps, scale_factor, layout_code, block_quant_group_size=None,
        weight_bias=None,
    ):  # fmt: skip
        module.trtllm_allreduce_fusion(
            allreduce_in, world_size, world_rank, token_num, hidden_dim, workspace_ptrs, launch_with_pdl, use_oneshot,
            trigger_completion_at_end, fp32_acc, pattern_code, allreduce_out, residual_in, residual_out, norm_out,
            quant_out, scale_out, rms_gamma, rms_eps, scale_factor, layout_code, block_quant_group_size, weight_bias,
        )  # fmt: skip

    return SimpleNamespace(trtllm_allreduce_fusion=trtllm_allreduce_fusion)
