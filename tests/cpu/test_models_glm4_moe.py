"""GLM4-MoE in one process against transformers' numbers, and checkpoints that do not fit it."""

import json
import shutil

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from fastdeploy_fusion.errors import CheckpointError
from fastdeploy_fusion.models import SamplingParams, build, generate, load_config, load_model, prompt_logits
from fastdeploy_fusion.weights import MTP_LAYER, TIED_HEAD
from tests.fake_tp import FakeTp, ranks
from tests.references import load_reference, round_rotary_as_the_reference_did

CHECKPOINTS = ("glm4_moe_a", "glm4_moe_b")
WAYS = {
    "packed": {},
    "one by one": {"packed": False},
    "token by token": {"max_tokens_per_step": 1},
    "in pieces": {"max_tokens_per_step": 7},
}


@pytest.fixture(scope="module", params=CHECKPOINTS)
def case(request, data):
    folder = data / request.param
    model = load_model(folder, FakeTp(), progress=False)
    return folder, model, load_reference(folder)


def relative_errors(got, want):
    return [float(np.abs(g - w).max() / np.abs(w).max()) for g, w in zip(got, want, strict=True)]


@pytest.mark.parametrize("way", WAYS)
def test_logits_are_the_references_however_the_prompts_are_fed(case, way, monkeypatch):
    folder, model, (prompts, logits, _) = case
    monkeypatch.setattr(model.rotary, "frequencies", model.rotary.frequencies)
    round_rotary_as_the_reference_did(model, folder)
    assert max(relative_errors(prompt_logits(model, prompts, **WAYS[way]), logits)) < 5e-6


def test_exact_rotary_frequencies_stay_near_the_references(case):
    """The product's own frequencies: for the bfloat16 reference, what rounding them did is visible but small."""
    _, model, (prompts, logits, _) = case
    assert max(relative_errors(prompt_logits(model, prompts), logits)) < 1e-3


@pytest.mark.parametrize("limit", [None, 1, 5])
def test_greedy_tokens_are_the_references(case, limit):
    _, model, (prompts, _, greedy) = case
    params = SamplingParams(max_new_tokens=16, ignore_eos=True)
    together = generate(model, model.tp, prompts, params, max_tokens_per_step=limit)
    assert [result.token_ids for result in together] == greedy
    assert {result.finish_reason for result in together} == {"length"}


def test_text_prompts_continue_as_the_reference_until_an_end_token(case):
    folder, model, _ = case
    answers = json.loads((folder / "expected_text.json").read_text())
    results = generate(model, model.tp, [a["prompt_ids"] for a in answers], SamplingParams(max_new_tokens=24))
    for answer, result in zip(answers, results, strict=True):
        ended = answer["greedy_ids"][-1] in model.config.eos_token_ids
        assert result.token_ids == (answer["greedy_ids"][:-1] if ended else answer["greedy_ids"])
        assert result.finish_reason == ("stop" if ended else "length")


def test_the_extra_prediction_layer_is_skipped_and_counted(case):
    folder, model, _ = case
    assert model.load_summary.skipped == ({MTP_LAYER: 5} if folder.name == "glm4_moe_b" else {})


def test_bfloat16_weights_and_activations_stay_near_float32(data):
    folder = data / "glm4_moe_b"
    prompts, logits, _ = load_reference(folder)
    model = load_model(folder, FakeTp(), dtype="bfloat16", progress=False)
    errors = relative_errors(prompt_logits(model, prompts), logits)
    assert 1e-5 < max(errors) < 0.06


@pytest.fixture
def copy(data, tmp_path):
    """A checkpoint to break: ``copy(edit)`` applies ``edit(config, tensors)`` and returns the folder."""

    def make(edit):
        folder = tmp_path / "broken"
        shutil.copytree(data / "glm4_moe_b", folder)
        config = json.loads((folder / "config.json").read_text())
        tensors = load_file(folder / "model.safetensors")
        edit(config, tensors)
        (folder / "config.json").write_text(json.dumps(config))
        save_file(tensors, folder / "model.safetensors")
        return folder

    return make


def test_renamed_missing_and_extra_tensors_are_all_in_one_error(copy):
    def edit(config, tensors):
        gate = "model.layers.1.mlp.gate."
        tensors[gate + "correction_bias"] = tensors.pop(gate + "e_score_correction_bias")
        del tensors["model.layers.2.mlp.experts.5.up_proj.weight"]
        tensors["model.visual.weight"] = np.zeros(3, np.float32)
        tensors["model.norm.weight"] = np.zeros(63, np.float32)

    with pytest.raises(CheckpointError) as caught:
        load_model(copy(edit), FakeTp(), progress=False)
    text = str(caught.value)
    assert "2 missing" in text and "2 unexpected" in text and "model.visual.weight" in text
    bias = "model.layers.1.mlp.gate.e_score_correction_bias"
    assert f"{bias}  (nearest stored: model.layers.1.mlp.gate.correction_bias)" in text
    assert "model.layers.2.mlp.experts.5.up_proj.weight" in text
    assert "model.norm.weight  ([63], expected [64])" in text


def test_the_config_decides_whether_the_head_is_tied(copy):
    tied = load_model(copy(lambda config, _: config.update(tie_word_embeddings=True)), FakeTp(), progress=False)
    assert tied.load_summary.skipped[TIED_HEAD] == 1
    assert tied.lm_head.weight is tied.embed_tokens.weight
    assert any("the embedding is used" in note for note in tied.load_summary.notes)


def test_a_tied_head_need_not_be_stored(copy, data):
    def edit(config, tensors):
        config["tie_word_embeddings"] = True
        tensors["lm_head.weight"][:] = 0
        del tensors["lm_head.weight"]

    tied = load_model(copy(edit), FakeTp(), progress=False)
    prompts = load_reference(data / "glm4_moe_b")[0]
    plain = load_model(data / "glm4_moe_b", FakeTp(), progress=False)
    plain.lm_head.weight = plain.embed_tokens.weight
    for got, want in zip(prompt_logits(tied, prompts), prompt_logits(plain, prompts), strict=True):
        np.testing.assert_array_equal(got, want)


def test_the_correction_bias_keeps_the_precision_of_its_file(copy):
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    fine = np.float32(30) + np.arange(8, dtype=np.float32) * np.float32(2**-12)
    model = load_model(
        copy(lambda _, tensors: tensors.update({name: fine})), FakeTp(), dtype="bfloat16", progress=False
    )
    np.testing.assert_array_equal(model.layers[1].mlp.router.e_score_correction_bias.numpy(), fine)
    assert len(set(fine.astype(ml_dtypes.bfloat16).tolist())) == 1


def test_names_and_shapes_are_the_same_fused_or_not_and_on_every_rank(data):
    config = load_config(data / "glm4_moe_a")
    models = [build(config, tp) for defers in (False, True) for tp in ranks(2, defers=defers)]
    assert len({tuple((s.key, s.shape) for s in model.checkpoint_tensors()) for model in models}) == 1


@pytest.mark.parametrize(
    ("world_size", "message"),
    [(3, r"num_attention_heads 8 is not divisible by tensor_parallel_size 3"), (16, r"16 is larger than num_att.* 8")],
)
def test_rank_counts_that_do_not_fit_are_refused_before_anything_is_read(data, world_size, message):
    with pytest.raises(ValueError, match=message):
        load_model(data / "glm4_moe_a", FakeTp(0, world_size), progress=False)
