"""The recurrence of Mamba2 (state-space duality; Dao and Gu, 2024), in float32: in chunks for prompts, or one step.

For each head, with ``a_t = exp(dt_t * A)``: ``state_t = a_t * state_{t-1} + dt_t * x_t B_t^T`` and ``y_t = state_t
C_t``. Within a chunk this is a masked matrix product; between chunks only the state is handed on. Heads of one group
share ``B`` and ``C``.
"""

from typing import Any

import numpy as np
import paddle
import paddle.nn.functional as F

from . import ops


def causal_conv(inputs: Any, weight: Any, bias: Any) -> Any:
    """``silu(conv(inputs))``: ``inputs [kernel - 1 + num_tokens, channels]``, ``weight [kernel, channels]``.

    Returns ``[num_tokens, channels]``; each channel is convolved alone, and no row looks ahead.
    """
    kernel = weight.shape[0]
    num_tokens = inputs.shape[0] - kernel + 1
    out = inputs[:num_tokens] * weight[0]
    for tap in range(1, kernel):
        out = out + inputs[tap : tap + num_tokens] * weight[tap]
    return F.silu(out if bias is None else out + bias)


def conv_step(windows: Any, weight: Any, bias: Any) -> Any:
    """``causal_conv`` of one token a sequence: ``windows [sequences, kernel, channels]``."""
    out = (windows * weight).sum(1)
    return F.silu(out if bias is None else out + bias)


def chunked_scan(x: Any, dt: Any, a: Any, b: Any, c: Any, state: Any, chunk_size: int) -> tuple[Any, Any]:
    """One sequence's outputs and its state after the last token.

    ``x [num_tokens, heads, head_dim]``, ``dt [num_tokens, heads]`` positive, ``a [heads]`` negative, ``b`` and ``c``
    ``[num_tokens, groups, state_size]``, ``state [heads, head_dim, state_size]``; returns ``y`` like ``x``.
    """
    outputs = []
    for first in range(0, x.shape[0], chunk_size):
        rows = slice(first, min(first + chunk_size, x.shape[0]))
        y, state = _chunk(x[rows], dt[rows], a, b[rows], c[rows], state)
        outputs.append(y)
    return outputs[0] if len(outputs) == 1 else paddle.concat(outputs), state


def _chunk(x: Any, dt: Any, a: Any, b: Any, c: Any, state: Any) -> tuple[Any, Any]:
    num_tokens, heads, head_dim = x.shape
    groups, state_size = b.shape[1:]
    grouped = [groups, heads // groups]
    # Heads first, split by group: [groups, heads of one, rows, ...].
    x = (x * dt.unsqueeze(-1)).transpose([1, 0, 2]).reshape([*grouped, num_tokens, head_dim])
    b, c = (t.transpose([1, 0, 2]).unsqueeze(1) for t in (b, c))
    decay = paddle.cumsum((dt * a).transpose([1, 0]).reshape([*grouped, num_tokens]), axis=-1)
    state = state.reshape([*grouped, head_dim, state_size])
    # What row j gave has decayed by exp(decay_i - decay_j) at row i >= j. Masked before exp, where it could overflow.
    since = decay.unsqueeze(-1) - decay.unsqueeze(-2) + ops.tensor_of(_future(num_tokens), x.place)
    y = paddle.matmul(paddle.matmul(c, b, transpose_y=True) * paddle.exp(since), x)
    y = y + paddle.matmul(c, state, transpose_y=True) * paddle.exp(decay).unsqueeze(-1)
    last = decay[:, :, -1:]
    kept = x * paddle.exp(last - decay).unsqueeze(-1)
    state = state * paddle.exp(last).unsqueeze(-1) + paddle.matmul(kept, b, transpose_x=True)
    return (
        y.reshape([heads, num_tokens, head_dim]).transpose([1, 0, 2]),
        state.reshape([heads, head_dim, state_size]),
    )


def _future(num_tokens: int) -> np.ndarray:
    """float32 ``[num_tokens, num_tokens]``: -inf above the diagonal, else 0."""
    return np.triu(np.full([num_tokens, num_tokens], -np.inf, np.float32), 1)


def scan_step(x: Any, dt: Any, a: Any, b: Any, c: Any, states: Any) -> tuple[Any, Any]:
    """One token of each sequence: operands as of ``chunked_scan`` with sequences for tokens, ``states`` one each."""
    sequences, heads, head_dim = x.shape
    groups, state_size = b.shape[1:]
    grouped = [sequences, groups, heads // groups]
    added = (x * dt.unsqueeze(-1)).reshape([*grouped, head_dim, 1]) * b.reshape([sequences, groups, 1, 1, state_size])
    kept = states * paddle.exp(dt * a).reshape([sequences, heads, 1, 1])
    states = kept + added.reshape(states.shape)
    c = c.reshape([sequences, groups, 1, state_size, 1])
    y = paddle.matmul(states.reshape([*grouped, head_dim, state_size]), c)
    return y.reshape([sequences, heads, head_dim]), states
