"""Layers and a decoder of the same shape as FastDeploy's: its class and attribute names, its constructor arguments, its
call order, its flags. The arithmetic is numpy's or Paddle's; nothing here knows this library.
"""

from types import SimpleNamespace
from typing import Any

import numpy as np
import paddle
from paddle import nn

HIDDEN, INNER, LAYERS, EPS = 64, 96, 3, 1e-5


def fd_config(tp_size: int, tp_rank: int, tp_group: Any, *, flag: bool, limit: int | None = None) -> Any:
    """What this library reads, and what the layers below read. Layer 0 is dense, the others have experts."""
    parallel = SimpleNamespace(
        tensor_parallel_size=tp_size,
        tensor_parallel_rank=tp_rank,
        tp_group=tp_group,
        expert_parallel_size=1,
        enable_flashinfer_allreduce_fusion=flag,
        use_sequence_parallel_moe=False,
    )
    if limit is not None:
        parallel.flashinfer_allreduce_fusion_max_tokens = limit
    model = SimpleNamespace(hidden_size=HIDDEN, rms_norm_eps=EPS, num_hidden_layers=LAYERS, first_k_dense_replace=1)
    return SimpleNamespace(parallel_config=parallel, model_config=model, quant_config=None)


class UnquantizedLinearMethod:
    def apply(self, layer: Any, x: Any) -> Any:
        out = paddle.matmul(x, layer.weight)
        return paddle.add(out, layer.bias) if layer.with_bias else out


class LinearBase(nn.Layer):
    def __init__(self, fd_config, prefix="", input_size=None, output_size=None, with_bias=False):
        super().__init__()
        self.forward = self.forward_cuda
        self.fd_config = fd_config
        self.prefix = prefix
        self.with_bias = with_bias
        self.weight_key, self.bias_key = f"{prefix}.weight", f"{prefix}.bias"
        self.quant_method = UnquantizedLinearMethod()
        self.weight = self.create_parameter([input_size, output_size], dtype="float32")
        self.bias = self.create_parameter([output_size], dtype="float32", is_bias=True) if with_bias else None

    def load_state_dict(self, state_dict):
        self.weight.set_value(self.shard(state_dict.pop(self.weight_key)))
        if self.with_bias:
            self.bias.set_value(state_dict.pop(self.bias_key) / self.fd_config.parallel_config.tensor_parallel_size)

    def shard(self, array):
        return array

    def forward_cuda(self, x):
        return self.quant_method.apply(self, x)

    def part(self, array, axis):
        parallel = self.fd_config.parallel_config
        return np.split(array, parallel.tensor_parallel_size, axis)[parallel.tensor_parallel_rank]


class ColumnParallelLinear(LinearBase):
    def __init__(self, fd_config, prefix, input_size, output_size):
        super().__init__(fd_config, prefix, input_size, output_size // fd_config.parallel_config.tensor_parallel_size)

    def shard(self, array):
        return self.part(array, 1)


class RowParallelLinear(LinearBase):
    def __init__(
        self, fd_config, prefix="", input_size=None, output_size=None, with_bias=False, reduce_results=True, layer_id=-1
    ):
        parallel = fd_config.parallel_config
        super().__init__(fd_config, prefix, input_size // parallel.tensor_parallel_size, output_size, with_bias)
        self.enable_all_reduce_fusion = parallel.enable_flashinfer_allreduce_fusion and "enable_all_reduce" in prefix
        self.tp_size, self.tp_group = parallel.tensor_parallel_size, parallel.tp_group
        self.reduce_results = reduce_results

    def shard(self, array):
        return self.part(array, 0)

    def forward_cuda(self, x):
        out = self.quant_method.apply(self, x)
        if self.reduce_results and self.tp_size > 1 and not self.enable_all_reduce_fusion:
            paddle.distributed.all_reduce(out, group=self.tp_group)
        return out


class RMSNorm(nn.Layer):
    """Its own fused branch is an error here: FastDeploy's would reduce a sum that its prefix test took for owed."""

    def __init__(self, fd_config, hidden_size, eps=1e-5, prefix="", bias=None, quant_scale=None, layer_id=-1):
        super().__init__()
        self.fd_config, self.prefix, self.hidden_size, self.eps = fd_config, prefix, hidden_size, eps
        self.weight_key = f"{prefix}.weight"
        self.bias, self.quant_scale = bias, quant_scale
        parallel = fd_config.parallel_config
        self.enable_all_reduce_fusion = (
            parallel.enable_flashinfer_allreduce_fusion and "post_attention_layernorm" in prefix
        )
        self.split_x = self.allgather_out = False
        self.weight = self.create_parameter([hidden_size], dtype="float32")
        self.engine_calls = 0

    def load_state_dict(self, state_dict):
        self.weight.set_value(state_dict.pop(self.weight_key))

    def forward(self, x, residual_input=None, forward_meta=None, proxy_rmsnorm=None):
        assert not self.enable_all_reduce_fusion, "the engine's own fused branch"
        assert isinstance(x, paddle.Tensor)
        self.engine_calls += 1
        total = x if residual_input is None else x + residual_input
        if proxy_rmsnorm is not None:
            return proxy_rmsnorm(total, self.weight, self.eps), total
        scale = paddle.rsqrt(paddle.mean(total * total, axis=-1, keepdim=True) + self.eps)
        return total * scale * self.weight, total


class Attention(nn.Layer):
    def __init__(self, fd_config, layer_id, prefix, mark):
        super().__init__()
        self.qkv_proj = ColumnParallelLinear(fd_config, f"{prefix}.qkv_proj", HIDDEN, INNER)
        self.o_proj = RowParallelLinear(
            fd_config, f"{prefix}.{mark}o_proj", INNER, HIDDEN, with_bias=True, layer_id=layer_id
        )

    def forward(self, forward_meta, hidden_states):
        return self.o_proj(paddle.tanh(self.qkv_proj(hidden_states)))


class Mlp(nn.Layer):
    def __init__(self, fd_config, layer_id, prefix, reduce_results=True):
        super().__init__()
        self.up_gate_proj = ColumnParallelLinear(fd_config, f"{prefix}.up_gate_proj", HIDDEN, INNER)
        self.down_proj = RowParallelLinear(
            fd_config, f"{prefix}.down_proj", INNER, HIDDEN, reduce_results=reduce_results
        )

    def forward(self, x, forward_meta=None):
        return self.down_proj(paddle.tanh(self.up_gate_proj(x)))


class Moe(nn.Layer):
    """One expert stands for all; the shared one reduces for itself, as FastDeploy's does."""

    def __init__(self, fd_config, layer_id, prefix):
        super().__init__()
        self.experts = Mlp(fd_config, layer_id, f"{prefix}.experts.0")
        self.shared_experts = Mlp(fd_config, layer_id, f"{prefix}.shared_experts")

    def forward(self, x, forward_meta=None):
        return self.experts(x) + self.shared_experts(x)


class DecoderLayer(nn.Layer):
    def __init__(self, fd_config, prefix, mark):
        super().__init__()
        layer_id = int(prefix.split(".")[-1])
        dense = layer_id < fd_config.model_config.first_k_dense_replace
        self.self_attn = Attention(fd_config, layer_id, f"{prefix}.self_attn", mark)
        self.mlp = (Mlp if dense else Moe)(fd_config, layer_id, f"{prefix}.mlp")
        norm_mark = "enable_all_reduce_fusion." if mark else ""
        self.input_layernorm = RMSNorm(
            fd_config, hidden_size=HIDDEN, eps=EPS, prefix=f"{prefix}.{norm_mark}input_layernorm", layer_id=layer_id
        )
        self.post_attention_layernorm = RMSNorm(
            fd_config, HIDDEN, EPS, prefix=f"{prefix}.{norm_mark}post_attention_layernorm", layer_id=layer_id
        )

    def forward(self, forward_meta, hidden_states, residual=None):
        hidden_states, residual = self.input_layernorm(
            hidden_states, residual_input=residual, forward_meta=forward_meta
        )
        hidden_states = self.self_attn(hidden_states=hidden_states, forward_meta=forward_meta)
        hidden_states, residual = self.post_attention_layernorm(hidden_states, residual)
        return self.mlp(hidden_states, forward_meta), residual


class Model(nn.Layer):
    """``mark``: "enable_all_reduce.", "enable_all_reduce_fusion." or ""."""

    def __init__(self, fd_config, mark):
        super().__init__()
        self.fd_config = fd_config
        self.layers = nn.LayerList([DecoderLayer(fd_config, f"model.layers.{i}", mark) for i in range(LAYERS)])
        self.norm = RMSNorm(fd_config, HIDDEN, EPS, prefix="model.norm")

    def forward(self, hidden_states, forward_meta=None):
        residual = None
        for layer in self.layers:
            hidden_states, residual = layer(forward_meta, hidden_states, residual)
        return self.norm(hidden_states, residual, forward_meta=forward_meta)[0]

    def load(self, state_dict):
        """Like a checkpoint loader: every layer takes its keys out; none may be left."""
        left = dict(state_dict)
        for layer in self.sublayers():
            if hasattr(layer, "weight_key"):
                layer.load_state_dict(left)
        assert not left, f"unused keys: {sorted(left)}"


def state_dict(seed: int = 0) -> dict[str, np.ndarray]:
    """A whole checkpoint with clean keys."""
    rng = np.random.default_rng(seed)
    found: dict[str, np.ndarray] = {}

    def matrix(key: str, rows: int, columns: int) -> None:
        found[key] = rng.standard_normal((rows, columns), np.float32) * 0.2

    def mlp(prefix: str) -> None:
        matrix(f"{prefix}.up_gate_proj.weight", HIDDEN, INNER)
        matrix(f"{prefix}.down_proj.weight", INNER, HIDDEN)

    for i in range(LAYERS):
        prefix = f"model.layers.{i}"
        matrix(f"{prefix}.self_attn.qkv_proj.weight", HIDDEN, INNER)
        matrix(f"{prefix}.self_attn.o_proj.weight", INNER, HIDDEN)
        found[f"{prefix}.self_attn.o_proj.bias"] = rng.standard_normal(HIDDEN, np.float32)
        for part in [f"{prefix}.mlp"] if i < 1 else [f"{prefix}.mlp.experts.0", f"{prefix}.mlp.shared_experts"]:
            mlp(part)
        for name in ("input_layernorm", "post_attention_layernorm"):
            found[f"{prefix}.{name}.weight"] = 1 + 0.1 * rng.standard_normal(HIDDEN, np.float32)
    found["model.norm.weight"] = np.ones(HIDDEN, np.float32)
    return found
