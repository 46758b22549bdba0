"""The FastDeploy adapter without peers: what it reads, and which norm a sum is left to."""

import inspect

import numpy as np
import paddle
import pytest

from fastdeploy_fusion.integrations import fastdeploy as fd
from fastdeploy_fusion.integrations.fastdeploy_model import consumer
from tests import fastdeploy_shapes as shapes

NORMS = {
    f"model.layers.{i}.{name}": None for i in range(2) for name in ("input_layernorm", "post_attention_layernorm")
} | {"model.norm": None}


@pytest.mark.parametrize(
    ("prefix", "next_layer", "norm"),
    [
        ("model.layers.1.self_attn.o_proj", False, "model.layers.1.post_attention_layernorm"),
        ("model.layers.0.mlp.down_proj", True, "model.layers.1.input_layernorm"),
        ("model.layers.1.mlp.down_proj", True, "model.norm"),
    ],
)
def test_a_sum_goes_to_the_next_norm(prefix, next_layer, norm):
    assert consumer(prefix, NORMS, next_layer=next_layer) == (norm, None)


@pytest.mark.parametrize(
    ("prefix", "next_layer", "reason"),
    [
        ("model.layers.0.mlp.down_proj", False, "may be read by others"),
        ("model.layers.1.mlp.shared_experts.down_proj", True, "added to others"),
        ("model.layers.7.self_attn.o_proj", False, "no norm at model.layers.7.post_attention_layernorm"),
        ("visual.merger.proj", True, "not part of a decoder layer"),
    ],
)
def test_a_sum_without_a_norm_stays_where_it_is(prefix, next_layer, reason):
    norm, refusal = consumer(prefix, NORMS, next_layer=next_layer)
    assert norm == "" and reason in refusal


def test_arguments_come_in_fastdeploys_order():
    names = {
        fd.ensure_workspace_initialized: "fd_config max_token_num hidden_dim use_fp32_lamport",
        fd.flashinfer_allreduce_residual_rmsnorm: "fd_config input_tensor residual weight eps max_token_num "
        "use_oneshot trigger_completion_at_end fp32_acc",
        fd.FlashInferWorkspaceManager.initialize: "self world_size rank max_token_num hidden_dim group "
        "use_fp32_lamport",
        fd.has_flashinfer: "",
        fd.cleanup_flashinfer_workspace: "",
    }
    for function, expected in names.items():
        kinds = inspect.signature(function).parameters.values()
        assert [p.name for p in kinds if p.kind is not p.KEYWORD_ONLY] == expected.split()


def test_one_rank_adds_and_normalises_by_itself():
    config = shapes.fd_config(1, 0, None, flag=True)
    assert fd.ensure_workspace_initialized(config) is False
    x, residual = paddle.full([2, shapes.HIDDEN], 3.0), paddle.full([2, shapes.HIDDEN], 1.0)
    norm, total = fd.flashinfer_allreduce_residual_rmsnorm(config, x, residual, paddle.full([shapes.HIDDEN], 2.0))
    np.testing.assert_allclose(total.numpy(), 4.0)
    np.testing.assert_allclose(norm.numpy(), 2.0, rtol=1e-5)
    fd.cleanup_flashinfer_workspace()


@pytest.mark.parametrize("flag", [True, False])
def test_on_one_rank_only_the_keys_change(flag):
    model = shapes.Model(shapes.fd_config(1, 0, None, flag=flag), "enable_all_reduce.")
    plain = shapes.Model(shapes.fd_config(1, 0, None, flag=False), "")
    done = fd.apply(model)
    assert done.sums == {} and set(done.skipped.values()) == {"fusion is off, or there is one rank"}
    model.load(shapes.state_dict())
    plain.load(shapes.state_dict())
    x = paddle.to_tensor(np.random.default_rng(0).standard_normal((3, shapes.HIDDEN), np.float32))
    np.testing.assert_allclose(model(x).numpy(), plain(x).numpy(), rtol=1e-5, atol=1e-5)


def test_settings_that_fastdeploy_may_not_have():
    config = shapes.fd_config(2, 0, None, flag=True, limit=100)
    assert fd.fusion_config(config).num_max_tokens == 100
    assert fd.fusion_config(config, 7).num_max_tokens == 7
    config.parallel_config.flashinfer_allreduce_fusion_backend = "shm"
    assert fd.fusion_config(config).backend == "shm"
    assert fd.model_dtype(config) == "float32"
    config.model_config.dtype = "bfloat16"
    assert fd.model_dtype(config) == "bfloat16"


def test_a_model_without_a_configuration_is_an_error():
    with pytest.raises(ValueError, match="fd_config"):
        fd.apply(paddle.nn.Linear(2, 2))
