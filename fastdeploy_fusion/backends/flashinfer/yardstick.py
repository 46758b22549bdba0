"""What ``tune`` holds FlashInfer's fused kernel against on a GPU: NCCL, and one fused addition-and-norm kernel.

The baseline gets the best that can be given to it: operands crossed beforehand, results in place. With upstream
FlashInfer beside torch the norm is FlashInfer's own; with Paddle's build it is Paddle's ``fused_rms_norm``, as in
FastDeploy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import paddle

from . import detect, driver, paddle_side

Call = Callable[[], Any]


class Yardstick:
    """Makes the sides of one comparison. ``collective``: whose NCCL all-reduce, ``paddle`` or ``torch``."""

    def __init__(self, paddle_group: Any, collective: str) -> None:
        self._group = paddle_group
        self._collective = collective
        way, reason = detect.find_way()
        if way is None:
            raise RuntimeError(reason)
        self._way = way
        norm = "FlashInfer's fused_add_rmsnorm" if way.kind == "torch" else "Paddle's fused_rms_norm"
        self.how = f"NCCL all-reduce of {collective}, then {norm}, in place"
        if way.kind == "torch":
            # Once, so that no call pays for it: torch's launches go to Paddle's stream.
            torch = way.torch
            index = paddle_side.enter_device(torch)
            stream = paddle_side.stream_reader(index)()
            torch.cuda.set_stream(torch.cuda.ExternalStream(stream))

    def sides(self, fusion: Any, pattern: str, partial: Any, residual: Any, weight: Any, eps: float) -> dict[str, Call]:
        """See ``tuning.sides.make``."""
        total = _copy(partial)
        reduce = self._reducer(total)
        if pattern == "all_reduce":
            return {"fused": lambda: fusion.all_reduce(partial), "plain": reduce}
        add_norm = self._norm(_copy(residual), weight, eps)
        normalise_total = add_norm(total)

        def pure() -> Any:
            summed = fusion.all_reduce(partial)
            return add_norm(summed)(), summed

        def unfused() -> Any:
            reduce()
            return normalise_total()

        fused = lambda: fusion.add_rms_norm(partial, residual, weight, eps)  # noqa: E731
        return {"fused": fused, "pure": pure, "plain": unfused}

    def _reducer(self, total: Any) -> Call:
        if self._collective == "torch":
            torch_group = _torch_world(self._way.torch)
            view = _view(self._way.torch, total)
            return lambda: (torch_group.all_reduce(view), total)
        reduce = paddle.distributed.stream.all_reduce
        return lambda: reduce(total, group=self._group, sync_op=True, use_calc_stream=True)

    def _norm(self, residual: Any, weight: Any, eps: float) -> Callable[[Any], Call]:
        """A function: a tensor of sums -> a call that adds ``residual`` and normalises."""
        if self._way.kind != "torch":
            kernel = paddle.incubate.nn.functional.fused_rms_norm

            def with_paddle(x: Any) -> Call:
                return lambda: kernel(x, weight, None, eps, begin_norm_axis=1, residual=residual)

            return with_paddle
        import flashinfer

        torch = self._way.torch
        left, scale = _view(torch, residual), _view(torch, weight)

        def with_flashinfer(x: Any) -> Call:
            view = _view(torch, x)
            return lambda: (flashinfer.norm.fused_add_rmsnorm(view, left, scale, eps), residual, weight)

        return with_flashinfer


def _view(torch: Any, tensor: Any) -> Any:
    """A torch tensor over the same memory."""
    return torch.utils.dlpack.from_dlpack(paddle_side.capsule(tensor))


def _copy(tensor: Any) -> Any:
    """A second tensor with the same values, by copies alone: Paddle's own kernels may be missing for this GPU."""
    return paddle.to_tensor(tensor.numpy(), dtype=tensor.dtype)


def _torch_world(torch: Any) -> Any:
    """``torch.distributed`` with its own NCCL group of all ranks, made on first use for the comparison only."""
    import os

    dist = torch.distributed
    if not dist.is_initialized():
        address, _, port = os.environ["PADDLE_TRAINER_ENDPOINTS"].split(",")[0].partition(":")
        index = paddle_side.device_index(paddle.device.get_device())
        # Under torchrun the agent serves a store of its own and would be waited for; this one is rank 0's to serve.
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"
        dist.init_process_group(
            "nccl",
            init_method=f"tcp://{address}:{int(port) + 307}",
            rank=int(os.environ["PADDLE_TRAINER_ID"]),
            world_size=int(os.environ["PADDLE_TRAINERS_NUM"]),
            device_id=torch.device("cuda", index),
        )
    return dist


def synchronize() -> None:
    """Wait for all work of this rank's GPU."""
    driver.synchronize()


def capture(body: Callable[[], Any]) -> Any:
    """``body`` in a CUDA graph of Paddle's: an object with ``replay()`` and ``reset()``. What ``body`` returns is kept
    alive with it."""
    from paddle.device.cuda.graphs import CUDAGraph

    graph = CUDAGraph()
    graph.capture_begin()
    try:
        kept = body()
    finally:
        graph.capture_end()
    graph.kept = kept
    return graph
