"""FlashInfer's own Python call on Paddle tensors: slower, and the measure that the bound call is compared with."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from . import bound, paddle_side
from .api import KIND_UNIFIED, Workspace
from .launchers import Options, Site


class Public:
    name = "public"

    def __init__(
        self, way: Any, workspace: Workspace, site: Site, options: Options, read_stream: Callable[[], int]
    ) -> None:
        self._way = way
        self._workspace = workspace
        self._site = site
        self._options = options
        self._read_stream = read_stream

    def _crossed(self, tensor: Any) -> Any:
        """The tensor as FlashInfer's framework knows it: itself under the proxy, torch's by DLPack beside torch."""
        if self._way.kind == "proxy":
            return tensor
        return self._way.torch.utils.dlpack.from_dlpack(paddle_side.capsule(tensor))

    def _on_stream(self) -> Any:
        """Launches go to torch's current stream: make that Paddle's."""
        if self._way.kind == "proxy":
            return contextlib.nullcontext()
        cuda = self._way.torch.cuda
        return cuda.stream(cuda.ExternalStream(self._read_stream(), device=self._site.device_id))

    def norm(
        self,
        tokens: int,
        partial: Any,
        residual: Any,
        weight: Any,
        at: tuple[int, int, int],
        eps: float,
        weight_bias: float,
        norm_out: Any,
        residual_out: Any,
    ) -> None:
        tensors = {
            "residual_in": residual,
            "residual_out": residual_out,
            "norm_out": norm_out,
            "rms_gamma": weight,
        }
        extra = {"weight_bias": weight_bias} if self._way.api.has_weight_bias else {}
        self._call(bound.NORM, tokens, partial, tensors, {"rms_eps": eps} | extra)

    def reduce(self, tokens: int, partial: Any, out: Any) -> None:
        self._call(bound.ALL_REDUCE, tokens, partial, {"output": out}, {})

    def _call(self, pattern: int, tokens: int, partial: Any, tensors: dict[str, Any], values: dict[str, Any]) -> None:
        site = self._site
        crossed = {name: self._crossed(tensor) for name, tensor in tensors.items()}
        call = call_unified if self._way.api.kind == KIND_UNIFIED else call_legacy
        with self._on_stream():
            call(
                self._way,
                self._workspace,
                site.constants(pattern, tokens, self._options),
                self._crossed(partial),
                crossed,
                values,
            )


def call_unified(
    way: Any, workspace: Any, constants: dict[str, Any], partial: Any, tensors: dict[str, Any], values: dict[str, Any]
) -> None:
    trigger = {"trigger_completion_at_end": True} if way.api.has_trigger else {}
    way.comm.allreduce_fusion(
        input=partial,
        workspace=workspace.unified,
        pattern=constants["pattern_code"],
        launch_with_pdl=constants["launch_with_pdl"],
        use_oneshot=constants["use_oneshot"],
        fp32_acc=constants["fp32_acc"],
        **trigger,
        **tensors,
        **values,
    )


def call_legacy(
    way: Any, workspace: Any, constants: dict[str, Any], partial: Any, tensors: dict[str, Any], values: dict[str, Any]
) -> None:
    def flat(name: str) -> Any:
        tensor = tensors.get(name)
        return None if tensor is None else tensor.reshape([-1])

    way.comm.trtllm_allreduce_fusion(
        allreduce_in=partial.reshape([-1]),
        workspace_ptrs=workspace.table,
        allreduce_out=flat("output"),
        residual_in=flat("residual_in"),
        residual_out=flat("residual_out"),
        norm_out=flat("norm_out"),
        quant_out=None,
        scale_out=None,
        rms_gamma=tensors.get("rms_gamma"),
        rms_eps=values.get("rms_eps"),
        scale_factor=None,
        layout_code=None,
        **({"weight_bias": values["weight_bias"]} if "weight_bias" in values else {}),
        **constants,
    )
