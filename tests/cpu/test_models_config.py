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
        ({"rope_scaling": {"type": "yarn", "factor": 4}}, "rope_scaling .* 'yarn'; only 'default'"),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1.0}}, "rope_parameters .* 'linear'"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'; only 'silu'"),
        ({"quantization_config": {"bits": 8}}, "quantization_config; give the unquantised"),
        ({"architectures": []}, "must name exactly one"),
    ],
)
def test_what_can_not_be_used_is_named(changes, message):
    with pytest.raises(CheckpointError, match=message):
        read(**changes)


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
