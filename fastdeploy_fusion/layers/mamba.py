"""Mamba2 mixer: a selective state space in place of attention. Heads and groups are split over the ranks of ``tp``."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import paddle
import paddle.nn.functional as F

from ..sites import fusable
from . import ops
from .linear import RowParallelLinear, ShardedLinear
from .parameter import TensorSpec, WeightedLayer, empty_parameter
from .selective_scan import causal_conv, chunked_scan, conv_step, scan_step
from .shards import split_mamba
from .state_cache import Prompt, StateCache, StateStep, write_rows

if TYPE_CHECKING:
    from ..fusion import AllReduceFusion


@dataclass(frozen=True)
class MambaSizes:
    """Of the whole mixer. ``dt_limit``: steps are held between these; ``chunk_size``: rows of a prompt at a time."""

    num_heads: int
    head_dim: int
    n_groups: int
    state_size: int
    conv_kernel: int
    chunk_size: int = 128
    with_bias: bool = False
    with_conv_bias: bool = True
    dt_limit: tuple[float, float] = (0.0, float("inf"))

    @property
    def inner_size(self) -> int:
        return self.num_heads * self.head_dim


class MambaMixer(WeightedLayer):
    """``forward(hidden [num_tokens, hidden_size], step)`` returns ``out_proj``'s sum, marked fusable.

    ``in_proj`` gives a gate, the convolution's channels (``x``, ``B``, ``C``) and ``dt``. With fewer groups than ranks,
    ranks that share a group each run all of its heads and use their own columns in ``out_proj``: the gated norm is over
    the group, so that a rank with some of its heads would need one more reduction a layer.
    """

    def __init__(
        self,
        hidden_size: int,
        sizes: MambaSizes,
        eps: float,
        *,
        tp: "AllReduceFusion",
        prefix: str,
        layer_id: int,
        dtype: str = "float32",
    ) -> None:
        super().__init__()
        self.layer_id, self.sizes, self.eps, self.prefix = layer_id, sizes, eps, prefix
        split = split_mamba(sizes.num_heads, sizes.head_dim, sizes.n_groups, tp.rank, tp.world_size)
        self.split = split
        inner, states = sizes.inner_size, sizes.n_groups * sizes.state_size
        self.heads, self.groups = split.num_heads, split.num_groups
        # Where x, B and C lie among the convolution's channels.
        self.channels = [
            split.inner,
            _shift(split.states(sizes.state_size), inner),
            _shift(split.states(sizes.state_size), inner + states),
        ]
        self.num_channels = sum(part.stop - part.start for part in self.channels)
        rows = [split.inner, *(_shift(part, inner) for part in self.channels)]
        rows.append(_shift(split.heads, 2 * (inner + states)))
        total = 2 * (inner + states) + sizes.num_heads
        parts = [(f"{prefix}.in_proj", total, part) for part in rows]
        self.in_proj = ShardedLinear(hidden_size, parts, sizes.with_bias, dtype)
        self.conv_weight = empty_parameter([self.num_channels, 1, sizes.conv_kernel], "float32")
        self.conv_bias = empty_parameter([self.num_channels], "float32") if sizes.with_conv_bias else None
        self.a_log, self.dt_bias, self.d = (empty_parameter([self.heads], "float32") for _ in range(3))
        self.norm_weight = empty_parameter([self.heads * sizes.head_dim], "float32")
        self.out_proj = RowParallelLinear(
            inner,
            hidden_size,
            tp=tp,
            prefix=fusable(f"{prefix}.out_proj"),
            with_bias=sizes.with_bias,
            dtype=dtype,
        )

    def new_cache(self, layers: Iterable[int], num_slots: int) -> StateCache:
        """Empty states for this and like mixers, which are numbered ``layers``."""
        s = self.sizes
        return StateCache(
            layers=layers,
            num_slots=num_slots,
            kernel=s.conv_kernel,
            channels=self.num_channels,
            heads=self.heads,
            head_dim=s.head_dim,
            state_size=s.state_size,
        )

    def forward(self, hidden: Any, step: StateStep) -> Any:
        gate, channels, dt = self._project(hidden)
        a = -paddle.exp(self.a_log)
        weight = self.conv_weight[:, 0].transpose([1, 0])
        y = [self._prompt(channels, dt, a, weight, step, prompt) for prompt in step.prompts]
        order = [paddle.arange(prompt.first, prompt.end) for prompt in step.prompts]
        if step.num_singles:
            y.append(self._singles(channels, dt, a, weight, step))
            order.append(step.rows)
        out = y[0]
        if len(y) > 1:  # back into the batch's order
            unordered = paddle.zeros([hidden.shape[0], *out.shape[1:]])
            out = paddle.scatter(unordered, paddle.concat(order), paddle.concat(y))
        out = self._gated_norm(out.reshape([hidden.shape[0], -1]), gate)
        return self.out_proj(ops.cast(out[:, self.split.own_columns], hidden.dtype))

    def _project(self, hidden: Any) -> tuple[Any, Any, Any]:
        """Gate ``[rows, local inner]``, channels, and ``dt [rows, heads]`` made positive; all float32."""
        projected = ops.cast(self.in_proj(hidden), paddle.float32)
        inner = self.heads * self.sizes.head_dim
        gate, channels, dt = paddle.split(projected, [inner, self.num_channels, self.heads], axis=-1)
        low, high = self.sizes.dt_limit
        dt = F.softplus(dt + self.dt_bias)
        return gate, channels, dt if (low, high) == (0.0, float("inf")) else paddle.clip(dt, low, high)

    def _prompt(self, channels: Any, dt: Any, a: Any, weight: Any, step: StateStep, prompt: Prompt) -> Any:
        """One sequence's several tokens: ``[rows, heads, head_dim]``; its states go on in the cache."""
        conv, ssm = step.cache.conv[self.layer_id], step.cache.ssm[self.layer_id]
        before, state = conv[prompt.slot], ssm[prompt.slot]
        if prompt.is_new:
            before, state = paddle.zeros_like(before), paddle.zeros_like(state)
        inputs = paddle.concat([before, channels[prompt.first : prompt.end]])
        x, b, c = self._parts(causal_conv(inputs, weight, self.conv_bias))
        y, state = chunked_scan(x, dt[prompt.first : prompt.end], a, b, c, state, self.sizes.chunk_size)
        slot = ops.tensor_of([prompt.slot])
        write_rows(conv, slot, inputs[inputs.shape[0] - before.shape[0] :].unsqueeze(0))
        write_rows(ssm, slot, state.unsqueeze(0))
        return y + x * self.d.unsqueeze(-1)

    def _singles(self, channels: Any, dt: Any, a: Any, weight: Any, step: StateStep) -> Any:
        """All sequences that go one token on: ``[sequences, heads, head_dim]``."""
        conv, ssm = step.cache.conv[self.layer_id], step.cache.ssm[self.layer_id]
        before, states = paddle.gather(conv, step.slots), paddle.gather(ssm, step.slots)
        if step.kept is not None:
            before, states = before * step.kept, states * step.kept.unsqueeze(-1)
        if step.prompts:
            channels, dt = paddle.gather(channels, step.rows), paddle.gather(dt, step.rows)
        windows = paddle.concat([before, channels.unsqueeze(1)], axis=1)
        x, b, c = self._parts(conv_step(windows, weight, self.conv_bias))
        y, states = scan_step(x, dt, a, b, c, states)
        write_rows(conv, step.slots, windows[:, 1:])
        write_rows(ssm, step.slots, states)
        return y + x * self.d.unsqueeze(-1)

    def _parts(self, channels: Any) -> tuple[Any, Any, Any]:
        """``x [rows, heads, head_dim]``, ``B`` and ``C`` ``[rows, groups, state_size]``."""
        s, rows = self.sizes, channels.shape[0]
        x, b, c = paddle.split(channels, [part.stop - part.start for part in self.channels], axis=-1)
        shape = [rows, self.groups, s.state_size]
        return x.reshape([rows, self.heads, s.head_dim]), b.reshape(shape), c.reshape(shape)

    def _gated_norm(self, y: Any, gate: Any) -> Any:
        """RMSNorm of ``y * silu(gate)`` over each group's elements."""
        gated = (y * F.silu(gate)).reshape([y.shape[0], self.groups, -1])
        scale = paddle.rsqrt((gated * gated).mean(-1, keepdim=True) + self.eps)
        return (gated * scale).reshape(y.shape) * self.norm_weight

    def own_tensors(self) -> list[TensorSpec]:
        s, split = self.sizes, self.split
        total = s.inner_size + 2 * s.n_groups * s.state_size
        specs, start = [], 0
        for part in self.channels:
            into = slice(start, start + part.stop - part.start)
            start = into.stop
            taps = (slice(0, 1), slice(0, s.conv_kernel))
            key, shape = f"{self.prefix}.conv1d", (total, 1, s.conv_kernel)
            specs.append(TensorSpec(f"{key}.weight", shape, self.conv_weight, (into, *taps), (part, *taps)))
            if self.conv_bias is not None:
                specs.append(TensorSpec(f"{key}.bias", (total,), self.conv_bias, (into,), (part,)))
        for name, param, size, part in (
            ("A_log", self.a_log, s.num_heads, split.heads),
            ("dt_bias", self.dt_bias, s.num_heads, split.heads),
            ("D", self.d, s.num_heads, split.heads),
            ("norm.weight", self.norm_weight, s.inner_size, split.inner),
        ):
            whole = (slice(0, part.stop - part.start),)
            specs.append(TensorSpec(f"{self.prefix}.{name}", (size,), param, whole, (part,)))
        return specs


def _shift(part: slice, by: int) -> slice:
    return slice(part.start + by, part.stop + by)
