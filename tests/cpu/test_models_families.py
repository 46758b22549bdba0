"""Qwen3-MoE, DeepSeek-V3 and Nemotron-H in one process against transformers' numbers, however prompts are fed."""

import json
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from fastdeploy_fusion.errors import CheckpointError
from fastdeploy_fusion.models import SamplingParams, build, generate, load_config, load_model, prompt_logits
from fastdeploy_fusion.weights import MTP_LAYER
from tests.fake_tp import FakeTp
from tests.references import load_reference

CHECKPOINTS = ("qwen3_moe_a", "deepseek_v3_a", "deepseek_v3_b", "nemotron_h_a", "nemotron_h_b")
WAYS = {
    "packed": {},
    "one by one": {"packed": False},
    "token by token": {"max_tokens_per_step": 1},
    "in pieces": {"max_tokens_per_step": 7},
}


@pytest.fixture(scope="module", params=CHECKPOINTS)
def case(request, data):
    folder = data / request.param
    return folder, load_model(folder, FakeTp(), progress=False), load_reference(folder)


def relative_errors(got, want):
    return [float(np.abs(g - w).max() / np.abs(w).max()) for g, w in zip(got, want, strict=True)]


@pytest.mark.parametrize("way", WAYS)
def test_logits_are_the_references_however_the_prompts_are_fed(case, way):
    _, model, (prompts, logits, _) = case
    assert max(relative_errors(prompt_logits(model, prompts, **WAYS[way]), logits)) < 1e-5


@pytest.mark.parametrize("limit", [None, 5])
def test_greedy_tokens_are_the_references(case, limit):
    _, model, (prompts, _, greedy) = case
    params = SamplingParams(max_new_tokens=16, ignore_eos=True)
    together = generate(model, model.tp, prompts, params, max_tokens_per_step=limit)
    assert [result.token_ids for result in together] == greedy


@pytest.mark.parametrize("name", [name for name in CHECKPOINTS if name.endswith("_a")])
def test_text_prompts_continue_as_the_reference_until_an_end_token(data, name):
    folder = data / name
    model = load_model(folder, FakeTp(), progress=False)
    answers = json.loads((folder / "expected_text.json").read_text())
    results = generate(model, model.tp, [a["prompt_ids"] for a in answers], SamplingParams(max_new_tokens=24))
    for answer, result in zip(answers, results, strict=True):
        ended = answer["greedy_ids"][-1] in model.config.eos_token_ids
        assert result.token_ids == (answer["greedy_ids"][:-1] if ended else answer["greedy_ids"])


def test_bfloat16_weights_and_activations_stay_near_float32(case):
    folder, _, (prompts, logits, _) = case
    model = load_model(folder, FakeTp(), dtype="bfloat16", progress=False)
    rows = [np.concatenate(values) for values in (prompt_logits(model, prompts), logits)]
    errors = np.abs(rows[0] - rows[1]).max(-1) / np.abs(rows[1]).max()
    assert 1e-5 < np.median(errors) < 0.06  # the median: where another expert is chosen, a row is far off


def test_layers_for_predicting_further_tokens_are_skipped_whatever_they_are_called(data, tmp_path):
    for name, key in (("nemotron_h_a", "mtp.layers.0.norm.weight"), ("deepseek_v3_a", "model.layers.3.enorm.weight")):
        folder = tmp_path / name
        shutil.copytree(data / name, folder)
        tensors = load_file(folder / "model.safetensors")
        save_file({**tensors, key: np.zeros(4, np.float32)}, folder / "model.safetensors")
        assert load_model(folder, FakeTp(), progress=False).load_summary.skipped == {MTP_LAYER: 1}


def test_a_mamba_tensor_that_is_missing_is_named(data, tmp_path):
    folder = tmp_path / "broken"
    shutil.copytree(data / "nemotron_h_a", folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["backbone.layers.2.mixer.A_logs"] = tensors.pop("backbone.layers.2.mixer.A_log")
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"mixer\.A_log  \(nearest stored: backbone\.layers\.2\.mixer\.A_logs\)"):
        load_model(folder, FakeTp(), progress=False)


@pytest.mark.parametrize(
    ("name", "num_ranks", "message"),
    [
        ("nemotron_h_a", 3, "not divisible by tensor_parallel_size 3"),
        ("deepseek_v3_a", 8, "num_attention_heads 4"),
        ("qwen3_moe_a", 16, "16 is larger than num_attention_heads 8"),
    ],
)
def test_rank_counts_that_do_not_fit_are_refused(data, name, num_ranks, message):
    with pytest.raises(ValueError, match=message):
        build(load_config(data / name), FakeTp(0, num_ranks))
