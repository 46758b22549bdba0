"""What bench_fusion.py compares: calls that leave the same numbers, on tensors that Paddle allocated.

The baselines get the best that can be given to them: operands crossed to torch beforehand, results in place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gpu_ranks as ranks
import numpy as np

EPS = 1e-6
LABELS = {
    "fused": "fusion.add_rms_norm",
    "bare": "bare fused kernel",
    "public": "flashinfer.comm.allreduce_fusion",
    "all_reduce": "fusion.all_reduce",
    "nccl": "NCCL all-reduce",
    "nccl_norm": "NCCL + fused add-norm",
    "nccl_add_norm": "NCCL + add + norm",
}
NAMES = tuple(LABELS)
ALL = ("graph", "eager", "host")
MODES_OF = dict.fromkeys(NAMES, ALL)


def make(group: Any, fusion: Any, tokens: int, hidden: int, args: Any) -> dict[str, Callable[[], Any]]:
    """Name -> a call without arguments. Its operands live as long as it does."""
    rng = np.random.default_rng(group.rank)
    shape = (tokens, hidden)
    # Small values: in-place sums of many calls must stay finite.
    partial, residual = (ranks.tensor(rng.standard_normal(shape, "float32") * 1e-3, args.dtype) for _ in range(2))
    weight = ranks.tensor(np.ones(hidden, "float32"), args.dtype)
    backend = ranks.live_backend(fusion)
    import torch

    torch.cuda.set_stream(torch.cuda.ExternalStream(ranks.paddle_stream()))  # once: no call pays for it
    calls: dict[str, Callable[[], Any]] = {
        "fused": lambda: fusion.add_rms_norm(partial, residual, weight, EPS),
        "all_reduce": lambda: fusion.all_reduce(partial),
        "bare": _bare(backend, tokens, partial, residual, weight),
        "public": _public(backend, partial, residual, weight),
    }
    if any(name.startswith("nccl") for name in args.what.split(",")):
        calls |= _baselines(group, partial, residual, weight, args.collective)
    return calls


def _bare(backend: Any, tokens: int, partial: Any, residual: Any, weight: Any) -> Callable[[], Any]:
    """The compiled function alone: argument list made beforehand, outputs reused, Paddle's stream set once."""
    from tvm_ffi import core

    launcher = backend.make_launcher("slots")
    outs = backend._empty(tokens), backend._empty(tokens)
    at = partial.data_ptr(), residual.data_ptr(), weight.data_ptr()
    launcher.norm(tokens, partial, residual, weight, at, EPS, 0.0, *outs)
    (arguments,) = launcher._memo.values()
    function, stream = launcher._function, ranks.paddle_stream
    set_stream, place = core._env_set_current_stream, (2, backend.site.device_id)

    def call() -> Any:
        before = set_stream(*place, stream())
        function(*arguments)
        set_stream(*place, before)
        return launcher, outs, partial, residual, weight

    return call


def _public(backend: Any, partial: Any, residual: Any, weight: Any) -> Callable[[], Any]:
    """FlashInfer's own call on torch tensors that exist already, its outputs allocated beforehand."""
    import torch

    views = [ranks.torch_view(tensor) for tensor in (partial, residual, weight)]
    outs = [torch.empty_like(views[0]) for _ in range(3)]
    comm, workspace = backend._way.comm, backend._workspace.unified

    def call() -> Any:
        return comm.allreduce_fusion(
            input=views[0], workspace=workspace, pattern=1, launch_with_pdl=True, residual_in=views[1],
            rms_gamma=views[2], rms_eps=EPS, norm_out=outs[0], residual_out=outs[1], output=outs[2],
            use_oneshot=True, fp32_acc=True,
        )  # fmt: skip

    return call


def _baselines(group: Any, partial: Any, residual: Any, weight: Any, collective: str) -> dict[str, Callable[[], Any]]:
    import flashinfer
    import torch

    total, left, scale = (ranks.torch_view(_copy(tensor)) for tensor in (partial, residual, weight))
    reduce = _torch_all_reduce(group, total) if collective == "torch" else _paddle_all_reduce(total)
    out = torch.empty_like(total)

    def nccl() -> Any:
        reduce()
        return total

    def nccl_norm() -> Any:
        reduce()
        flashinfer.norm.fused_add_rmsnorm(total, left, scale, EPS)
        return total, left

    def nccl_add_norm() -> Any:
        reduce()
        torch.add(total, left, out=left)
        flashinfer.norm.rmsnorm(left, scale, EPS, out=out)
        return out, left

    return {"nccl": nccl, "nccl_norm": nccl_norm, "nccl_add_norm": nccl_add_norm}


def _copy(tensor: Any) -> Any:
    """A second tensor of Paddle's with the same values, by copies alone."""
    import paddle

    return paddle.to_tensor(tensor.numpy())


def _torch_all_reduce(group: Any, total: Any) -> Callable[[], Any]:
    """torch's NCCL process group on the same memory: made here, for the baseline only."""
    import os

    import torch.distributed as dist

    if not dist.is_initialized():
        address = os.environ.get("TORCHRUN_MASTER_ADDR", "127.0.0.1")
        port = int(os.environ.get("TORCHRUN_MASTER_PORT", "29500")) + 201
        # torchrun's agent serves its own store only; this one is to be served by rank 0.
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"
        dist.init_process_group(
            "nccl", init_method=f"tcp://{address}:{port}", rank=group.rank, world_size=group.size,
            device_id=total.device,
        )  # fmt: skip
    return lambda: dist.all_reduce(total)


def _paddle_all_reduce(total: Any) -> Callable[[], Any]:
    import paddle
    import torch

    tensor = paddle.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(total))
    reduce = paddle.distributed.stream.all_reduce
    return lambda: reduce(tensor, sync_op=True, use_calc_stream=True)
