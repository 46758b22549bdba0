"""config.json in both forms found in the wild, and what is said when something in it can't be used."""

import json

import pytest

from fastdeploy_fusion.errors import CheckpointError
from fastdeploy_fusion.models import ModelConfig, load_config

BASE = {
    "architectures": ["Glm4MoeForCausalLM"],
    "vocab_size": 384,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
TOP = {"rope_theta": 1e6, "partial_rotary_factor": 0.25, "rope_scaling": None}
NESTED = {"rope_parameters": {"rope_theta": 1e6, "partial_rotary_factor": 0.25, "rope_type": "default"}}


def read(**changes):
    values = {key: value for key, value in (BASE | TOP | changes).items() if value != "absent"}
    return ModelConfig.from_hf(values)


def test_both_forms_of_rotary_settings_mean_the_same():
    assert ModelConfig.from_hf(BASE | TOP) == ModelConfig.from_hf(BASE | NESTED)
    assert ModelConfig.from_hf(BASE | NESTED).rotary_dim == 4
    # Files written during the change have both; the newer place wins.
    assert ModelConfig.from_hf(BASE | NESTED | {"rope_theta": 5.0}).rope_theta == 1e6


def test_glm4_rotates_half_of_each_head_unless_told_otherwise():
    assert read(partial_rotary_factor="absent").rotary_dim == 8


def test_head_size_and_kv_heads_have_their_usual_defaults():
    config = read(head_dim="absent", num_key_value_heads="absent")
    assert (config.head_dim, config.num_key_value_heads) == (8, 8)


def test_end_tokens_come_from_the_generation_config_first():
    values = BASE | TOP | {"eos_token_id": 7}
    assert ModelConfig.from_hf(values).eos_token_ids == (7,)
    assert ModelConfig.from_hf(values, {"eos_token_id": [1, 2]}).eos_token_ids == (1, 2)
    assert ModelConfig.from_hf(values, {"temperature": 1.0}).eos_token_ids == (7,)
    assert ModelConfig.from_hf(BASE | TOP).eos_token_ids == ()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": "absent"}, "no 'hidden_size', which the model needs"),
        ({"num_hidden_layers": 0}, "num_hidden_layers = 0; it must be a positive integer"),
        ({"vocab_size": "many"}, "vocab_size = 'many'"),
        ({"rope_theta": "absent"}, "no 'rope_theta'"),
        ({"rope_scaling": {"type": "yarn", "factor": 4}}, "no 'original_max_position_embeddings'"),
        ({"rope_scaling": {"type": "longrope", "factor": 4}}, "rope_scaling .* 'longrope'; known are .* 'yarn'"),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1.0}}, "rope_parameters .* 'linear'"),
        ({"use_sliding_window": True}, "use_sliding_window True; only False"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'; only 'silu'"),
        ({"quantization_config": {"bits": 8}}, "quantization_config; give the unquantised"),
        ({"architectures": []}, "must name exactly one"),
        ({"max_position_embeddings": "512"}, "max_position_embeddings = '512'; it must be a whole number"),
        ({"mlp_bias": True}, "mlp_bias true"),
        ({"rope_scaling": "x"}, "rope_scaling = 'x'; it must be an object"),
        ({"rms_norm_eps": "x"}, "rms_norm_eps = 'x'; it must be a number"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps = -1.0; it must be at least 0"),
        ({"partial_rotary_factor": 3}, "partial_rotary_factor = 3.0; it must be above 0 and at most 1"),
        ({"mlp_only_layers": 3}, "mlp_only_layers = 3; it must be a list"),
        ({"eos_token_id": "</s>"}, "eos_token_id = '</s>'; it must be a token id"),
    ],
)
def test_what_can_not_be_used_is_named(changes, message):
    with pytest.raises(CheckpointError, match=message):
        read(**changes)


HYBRID = {
    **{key: value for key, value in BASE.items() if key not in ("num_hidden_layers", "rms_norm_eps")},
    "architectures": ["NemotronHForCausalLM"],
    "layer_norm_epsilon": 1e-5,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "n_groups": 2,
    "ssm_state_size": 16,
    "conv_kernel": 4,
    "chunk_size": 8,
}
WORDS = {"layers_block_type": ["mamba", "mlp", "attention", "moe"]}
NEW_WORDS = {"layers_block_type": ["linear_attention", "mlp", "full_attention", "moe"]}
PATTERN = {"hybrid_override_pattern": "M-*E", "num_hidden_layers": 4}


def test_the_forms_of_a_hybrids_layers_mean_the_same():
    config = ModelConfig.from_hf(HYBRID | PATTERN)
    assert config == ModelConfig.from_hf(HYBRID | WORDS) == ModelConfig.from_hf(HYBRID | NEW_WORDS)
    assert config.mixers == ("mamba", "mlp", "attention", "moe") and config.num_hidden_layers == 4
    older = {"mamba_n_groups": 2, "mamba_d_conv": 4, "mamba_chunk_size": 8}
    renamed = {key: value for key, value in HYBRID.items() if key not in ("n_groups", "conv_kernel", "chunk_size")}
    assert ModelConfig.from_hf(renamed | older | PATTERN).mamba == config.mamba


@pytest.mark.parametrize("limit", [[0.0, float("inf")], [0, "Infinity"], [0.0, {"__float__": "Infinity"}], None])
def test_an_infinite_step_limit_may_be_written_in_several_ways(limit):
    assert ModelConfig.from_hf(HYBRID | PATTERN | {"time_step_limit": limit}).mamba.dt_limit == (0.0, float("inf"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hybrid_override_pattern": "MX*E"}, "mixers X; known are M, mamba, linear_attention, "),
        ({"num_hidden_layers": 5}, "lists 4 mixers and has num_hidden_layers 5; make them equal"),
        ({"mlp_hidden_act": "silu"}, "mlp_hidden_act 'silu'; only 'relu2'"),
        ({"mamba_num_heads": None}, "no 'mamba_num_heads'"),
    ],
)
def test_what_a_hybrid_can_not_use_is_named(changes, message):
    with pytest.raises(CheckpointError, match=message):
        ModelConfig.from_hf(HYBRID | PATTERN | changes)


def test_qwen3_has_experts_where_its_config_says():
    qwen = {key: value for key, value in BASE.items() if key != "n_routed_experts"} | TOP
    qwen |= {"architectures": ["Qwen3MoeForCausalLM"], "mlp_only_layers": [3], "decoder_sparse_step": 2}
    for name in ("num_experts", "num_local_experts"):
        config = ModelConfig.from_hf(qwen | {name: 8})
        assert [config.moe.in_layer(i) for i in range(6)] == [False, True, False, False, False, True]
        assert config.use_qk_norm and not config.moe.norm_topk_prob


def test_an_unknown_architecture_lists_the_known_and_the_nearest(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["Glm4MoeForCasualLM"]}))
    with pytest.raises(
        CheckpointError, match=r"'Glm4MoeForCasualLM' is not implemented; known: .*nearest: Glm4MoeForC"
    ):
        load_config(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"), [("{", "not valid JSON"), ("[1]", "holds list, not a JSON object"), ("\0\0", "not valid JSON")]
)
def test_a_broken_file_is_named(tmp_path, text, message):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=rf"config.json.*{message}"):
        load_config(tmp_path)


def test_a_folder_that_is_not_there_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"can't read .*nowhere/config.json: No such file"):
        load_config(tmp_path / "nowhere")
