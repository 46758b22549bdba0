"""The shapes of API that FlashInfer has had, told apart by what is there; workspaces made and given back through them.

unified: `create_allreduce_fusion_workspace` and `allreduce_fusion`, whose workspace lies in memory that is exchanged
through the communicator that we pass (0.6.18 to 0.7.4).
legacy: `trtllm_create_ipc_workspace_for_all_reduce_fusion` and friends over CUDA IPC (0.4.1 to 0.6.6, Paddle's build
included), which returns two, three or four values.
Versions between (0.6.12) make the workspace in torch's symmetric memory, which takes a torch process group: refused.
"""

from __future__ import annotations

import gc
import inspect
import weakref
from dataclasses import dataclass
from typing import Any

from . import driver
from .comm import Communicator, distributed_by

KIND_UNIFIED, KIND_LEGACY = "unified", "legacy"

# The arguments that we pass, by name. tests/ binds them against the recorded signatures of the real packages.
CREATE_UNIFIED = (
    "backend",
    "world_size",
    "rank",
    "max_token_num",
    "hidden_dim",
    "dtype",
    "gpus_per_node",
    "comm_backend",
)
CREATE_LEGACY = ("tp_rank", "tp_size", "max_token_num", "hidden_dim", "use_fp32_lamport", "group")
CALL_UNIFIED = (
    "input", "workspace", "pattern", "launch_with_pdl", "output", "residual_out", "norm_out", "residual_in",
    "rms_gamma", "rms_eps", "use_oneshot", "fp32_acc",
)  # fmt: skip
CALL_LEGACY = (
    "allreduce_in", "world_size", "world_rank", "token_num", "hidden_dim", "workspace_ptrs", "launch_with_pdl",
    "trigger_completion_at_end", "fp32_acc", "pattern_code", "use_oneshot", "allreduce_out", "residual_in",
    "residual_out", "norm_out", "quant_out", "scale_out", "rms_gamma", "rms_eps", "scale_factor", "layout_code",
)  # fmt: skip


class UnknownApi(ImportError):
    """FlashInfer is there, but none of its entries can be called as this package knows to call them."""


@dataclass(frozen=True)
class Api:
    """kind: unified or legacy. has_weight_bias: the norm can scale by weight_bias + weight. wide_float32: the two-shot
    buffer of a float32 workspace has 4 bytes an element. has_trigger: the unified call takes the completion flag."""

    kind: str
    has_weight_bias: bool
    has_trigger: bool
    wide_float32: bool


def parameters(function: Any) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(inspect.unwrap(function)).parameters)


def accepts(function: Any, names: tuple[str, ...]) -> bool:
    """Whether `function` can be called with exactly these keywords: all known, none required left out."""
    try:
        inspect.signature(inspect.unwrap(function)).bind(**dict.fromkeys(names))
    except (TypeError, ValueError):
        return False
    return True


def refers_to(function: Any, *names: str) -> bool:
    """Whether the function's own code uses all these global names and attributes."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return code is not None and set(names) <= set(code.co_names)


def recognize(comm: Any, version: str) -> Api:
    """The API that `flashinfer.comm` offers; UnknownApi if it is none that can be used without a torch group."""
    create = getattr(comm, "trtllm_create_ipc_workspace_for_all_reduce_fusion", None)
    call = getattr(comm, "trtllm_allreduce_fusion", None)
    unified = getattr(comm, "create_allreduce_fusion_workspace", None), getattr(comm, "allreduce_fusion", None)
    if create is None or call is None or not hasattr(comm, "trtllm_destroy_ipc_workspace_for_all_reduce_fusion"):
        raise _unknown(version)
    bias = "weight_bias" in parameters(call)
    if (
        all(unified)
        and accepts(unified[0], CREATE_UNIFIED)
        and accepts(unified[1], CALL_UNIFIED)
        # 0.6.6 takes the rank in the group for the device's index instead of asking for the current device.
        and refers_to(create, "SymmDeviceMemory", "current_device")
    ):
        has_trigger = "trigger_completion_at_end" in parameters(unified[1])
        return Api(KIND_UNIFIED, bias, has_trigger, _is_wide(version))
    if accepts(call, CALL_LEGACY) and accepts(create, CREATE_LEGACY) and refers_to(create, "create_shared_buffer"):
        return Api(KIND_LEGACY, bias, True, _is_wide(version))
    raise _unknown(version)


def _unknown(version: str) -> UnknownApi:
    import paddle

    return UnknownApi(
        f"FlashInfer {version} with Paddle {paddle.__version__}: its all-reduce fusion entries are none of those that "
        "this package can use (0.4.1 to 0.6.6, 0.6.18 to 0.7.4); install one of them"
    )


def _is_wide(version: str) -> bool:
    major, _, rest = version.partition(".")
    return (int(major), int(rest.partition(".")[0])) >= (0, 7) if major.isdigit() else False


class Workspace:
    """A live FlashInfer workspace: `table` (its tensor of pointers, FlashInfer's kind of tensor), `unified` (its
    workspace object, for the public call) or None. Made and closed collectively over the communicator."""

    def __init__(self, way: Any, communicator: Communicator, plan: Any) -> None:
        self._way = way
        self._communicator = communicator
        self.unified: Any = None
        self._handles: Any = None
        self._torch_held = _torch_reserved(way)
        rank, size = communicator.Get_rank(), communicator.Get_size()
        if way.api.kind == KIND_UNIFIED:
            self.unified = way.comm.create_allreduce_fusion_workspace(
                backend="trtllm",
                world_size=size,
                rank=rank,
                max_token_num=plan.num_max_tokens,
                hidden_dim=plan.hidden_size,
                dtype=getattr(way.torch, plan.dtype),
                gpus_per_node=size,
                comm_backend=communicator,
            )
            self._handles, self.table = self.unified.ipc_handles, self.unified.workspace_tensor
        else:
            with distributed_by(communicator, _modules(way)) as group:
                made = way.comm.trtllm_create_ipc_workspace_for_all_reduce_fusion(
                    tp_rank=rank,
                    tp_size=size,
                    max_token_num=plan.num_max_tokens,
                    hidden_dim=plan.hidden_size,
                    use_fp32_lamport=plan.dtype == "float32",
                    group=group,
                )
            self._handles, self.table = made[0], made[1]  # more values follow where metadata is returned
        if way.proxy is not None:
            way.proxy.tidy()
        # [3 buffers x ranks, control flag], as the kernels read it.
        self._control_flag = driver.read_words(int(self.table.data_ptr()), 3 * size + 1)[-1]

    def close(self, peers_alive: bool) -> None:
        """Give all memory back. Kernels must be done; with `peers_alive` collective: peers unmap before we free."""
        communicator = self._communicator if peers_alive else _Alone(self._communicator)
        communicator.barrier()
        self._close_peer_memory()
        destroy = self._way.comm.trtllm_destroy_ipc_workspace_for_all_reduce_fusion
        with distributed_by(communicator, _modules(self._way)) as group:
            destroy(self._handles, group)
        if self.unified is not None:
            memories = [weakref.ref(memory) for memory in self.unified.mem_handles]
            self.unified.destroy()
            self.unified = None
            self._handles = None
            if any(memory() is not None for memory in memories):
                gc.collect()  # the memory is freed by destructors
        self._handles = self.table = None
        driver.free(self._control_flag)  # FlashInfer's own destroy leaves it allocated
        if self._torch_held == 0:
            self._way.torch.cuda.empty_cache()  # the pointer table's segment: torch held nothing before us
        communicator.barrier()

    def _close_peer_memory(self) -> None:
        """Older FlashInfer frees its own buffers and leaves the peers' mapped here, which keeps their memory taken."""
        free = getattr(getattr(self._way.comm, "cuda_ipc", None), "free_shared_buffer", None)
        if self._way.api.kind != KIND_LEGACY or free is None or refers_to(free, "cudaIpcCloseMemHandle"):
            return
        rank = self._communicator.Get_rank()
        for pointers in self._handles:
            for peer, pointer in enumerate(pointers):
                if peer != rank:
                    driver.close_peer_memory(pointer)


class _Alone(Communicator):
    """After a peer has died: barriers that nobody would answer are left out."""

    def __init__(self, communicator: Communicator) -> None:
        super().__init__(communicator._group, communicator._members)

    def barrier(self) -> None:
        return None


def _modules(way: Any) -> list[Any]:
    """FlashInfer's modules whose `dist` the legacy functions go through."""
    return [module for name in ("trtllm_ar", "cuda_ipc") if (module := getattr(way.comm, name, None)) is not None]


def _torch_reserved(way: Any) -> int:
    """Bytes that a real torch's allocator holds; -1 under the proxy, where Paddle's own allocator serves."""
    return int(way.torch.cuda.memory_reserved()) if way.kind == "torch" else -1
