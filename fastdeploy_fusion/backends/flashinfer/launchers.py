"""Three ways to launch the same kernel with Paddle tensors. All take the same two calls, `norm` and `reduce`; `at` is
the addresses of partial, residual and weight.

direct: Paddle's tensors given to the bound FFI function as they are (Paddle >= 3.3); the FFI takes Paddle's stream.
slots: the bound function over reusable views (views.py), on Paddle's current stream (Paddle 2.6).
public: FlashInfer's own Python call, where the bound one is not understood.

Completion is triggered at the end, always: the kernel reads the residual before it waits for the kernel in front of
it, so that a kernel that completes early hands on a residual that is not written yet.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from . import bound, sizes
from .views import CUDA, Shape, Slot


@dataclass(frozen=True)
class Options:
    """How kernels are launched. oneshot: None takes the rule in sizes.use_oneshot; tests force True or False."""

    pdl: bool = True
    oneshot: bool | None = None


@dataclass(frozen=True)
class Site:
    """Constants of a launcher: the plan's, this rank's, and the device's."""

    world_size: int
    rank: int
    hidden_size: int
    dtype: str
    num_max_tokens: int
    device_id: int
    device_type: int = CUDA

    def oneshot(self, tokens: int, options: Options) -> bool:
        if options.oneshot is not None:
            return options.oneshot
        return sizes.use_oneshot(tokens, self.hidden_size, self.dtype, self.world_size)

    def constants(self, pattern: int, tokens: int, options: Options) -> dict[str, Any]:
        """Every argument of the FFI function that is not a tensor, but the norm's eps and weight_bias."""
        return {
            "world_size": self.world_size,
            "world_rank": self.rank,
            "token_num": tokens,
            "hidden_dim": self.hidden_size,
            "launch_with_pdl": options.pdl,
            "use_oneshot": self.oneshot(tokens, options),
            "trigger_completion_at_end": True,
            "fp32_acc": True,
            "pattern_code": pattern,
        }


_MEMO_LIMIT = 512  # distinct (tokens, eps) remembered; a server meets a few dozen


class _Bound:
    """What both bound launchers share: remembered argument lists, by everything in them that is not a tensor."""

    def __init__(self, binding: bound.Binding, site: Site, options: Options) -> None:
        self._function = binding.function
        self._binding = binding
        self._site = site
        self._options = options
        self._memo: dict[Any, list[Any]] = {}

    def _remember(self, key: Any, arguments: list[Any]) -> list[Any]:
        if len(self._memo) >= _MEMO_LIMIT:
            self._memo.clear()
        self._memo[key] = arguments
        return arguments


class Slots(_Bound):
    name = "slots"

    def __init__(
        self, binding: bound.Binding, site: Site, options: Options, table: int, read_stream: Callable[[], int]
    ) -> None:
        """`table`: address of the workspace's pointer table. `read_stream`: Paddle's current stream."""
        super().__init__(binding, site, options)
        from tvm_ffi import core

        self._set_stream = core._env_set_current_stream
        self._read_stream = read_stream
        self._device = site.device_type, site.device_id
        self._shape = Shape(1, site.hidden_size)
        place = site.device_type, site.device_id
        self._partial, self._residual, self._norm_out, self._residual_out = (
            Slot(self._shape, site.dtype, *place) for _ in range(4)
        )
        self._weight = Slot(Shape(site.hidden_size), site.dtype, *place)
        self._table = Slot(Shape(3 * site.world_size + 1), "int64", *place)
        self._table.address.value = table

    def _norm_arguments(self, tokens: int, eps: float, weight_bias: float) -> list[Any]:
        values = self._site.constants(bound.NORM, tokens, self._options) | {
            "workspace_ptrs": self._table.view,
            "allreduce_in": self._partial.view,
            "residual_in": self._residual.view,
            "residual_out": self._residual_out.view,
            "norm_out": self._norm_out.view,
            "rms_gamma": self._weight.view,
            "rms_eps": eps,
            "weight_bias": weight_bias,
        }
        return self._remember((tokens, eps, weight_bias), self._binding.arguments(values))

    def _reduce_arguments(self, tokens: int) -> list[Any]:
        values = self._site.constants(bound.ALL_REDUCE, tokens, self._options) | {
            "workspace_ptrs": self._table.view,
            "allreduce_in": self._partial.view,
            "allreduce_out": self._norm_out.view,
        }
        return self._remember(tokens, self._binding.arguments(values))

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
        arguments = self._memo.get((tokens, eps, weight_bias)) or self._norm_arguments(tokens, eps, weight_bias)
        self._shape.extents[0] = tokens
        self._partial.address.value, self._residual.address.value, self._weight.address.value = at
        self._norm_out.address.value = norm_out.data_ptr()
        self._residual_out.address.value = residual_out.data_ptr()
        self._launch(arguments)

    def reduce(self, tokens: int, partial: Any, out: Any) -> None:
        arguments = self._memo.get(tokens) or self._reduce_arguments(tokens)
        self._shape.extents[0] = tokens
        self._partial.address.value = partial.data_ptr()
        self._norm_out.address.value = out.data_ptr()
        self._launch(arguments)

    def _launch(self, arguments: list[Any]) -> None:
        kind, index = self._device
        before = self._set_stream(kind, index, self._read_stream())
        try:
            self._function(*arguments)
        finally:
            self._set_stream(kind, index, before)


class Direct(_Bound):
    name = "direct"

    def __init__(self, binding: bound.Binding, site: Site, options: Options, table: Any) -> None:
        """`table`: the workspace's pointer table, any tensor that the FFI takes."""
        super().__init__(binding, site, options)
        import tvm_ffi

        # Not given as torch's tensor: the FFI takes its stream from the first framework that it meets.
        self._table = tvm_ffi.from_dlpack(table)
        self._places = {name: binding.order.index(name) for name in bound.NEEDED}

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
        key = (tokens, eps, weight_bias)
        template = self._memo.get(key)
        if template is None:
            values = self._site.constants(bound.NORM, tokens, self._options)
            values |= {"workspace_ptrs": self._table, "rms_eps": eps, "weight_bias": weight_bias}
            template = self._remember(key, self._binding.arguments(values))
        arguments, place = template.copy(), self._places
        arguments[place["allreduce_in"]] = partial
        arguments[place["residual_in"]] = residual
        arguments[place["rms_gamma"]] = weight
        arguments[place["norm_out"]] = norm_out
        arguments[place["residual_out"]] = residual_out
        self._function(*arguments)

    def reduce(self, tokens: int, partial: Any, out: Any) -> None:
        template = self._memo.get(tokens)
        if template is None:
            values = self._site.constants(bound.ALL_REDUCE, tokens, self._options) | {"workspace_ptrs": self._table}
            template = self._remember(tokens, self._binding.arguments(values))
        arguments, place = template.copy(), self._places
        arguments[place["allreduce_in"]] = partial
        arguments[place["allreduce_out"]] = out
        self._function(*arguments)
