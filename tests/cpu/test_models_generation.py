"""When generation stops, what sampling draws, and which prompts are refused."""

from dataclasses import replace

import numpy as np
import pytest

from fastdeploy_fusion.models import SamplingParams, generate, load_model
from fastdeploy_fusion.models.sampling import Sampler
from tests.fake_tp import FakeTp

PROMPTS = [[5, 9, 200], [17], [300, 2, 2, 8, 1]]


@pytest.fixture(scope="module")
def model(data):
    return load_model(data / "glm4_moe_a", FakeTp(), progress=False)


def run(model, prompts=PROMPTS, limit=None, **params):
    return generate(model, model.tp, prompts, SamplingParams(**params), max_tokens_per_step=limit)


def tokens(results):
    return [result.token_ids for result in results]


def test_generation_stops_before_an_end_token_while_others_go_on(model, monkeypatch):
    full = tokens(run(model, max_new_tokens=10))
    end = full[1][4]
    monkeypatch.setattr(model, "config", replace(model.config, eos_token_ids=(end,)))
    stopped = run(model, max_new_tokens=10)
    ignoring = run(model, max_new_tokens=10, ignore_eos=True)
    for whole, result in zip(full, stopped, strict=True):
        cut = whole.index(end) if end in whole else len(whole)
        assert result.token_ids == whole[:cut]
        assert result.finish_reason == ("stop" if end in whole else "length")
    assert stopped[1].finish_reason == "stop"
    assert tokens(ignoring) == full


def test_an_end_token_at_once_gives_an_empty_answer(model, monkeypatch):
    monkeypatch.setattr(model, "config", replace(model.config, eos_token_ids=tuple(range(384))))
    results = run(model, max_new_tokens=3)
    assert [(r.token_ids, r.finish_reason) for r in results] == [([], "stop")] * 3


def test_no_prompts_no_results(model):
    assert run(model, prompts=[]) == []


def test_a_seed_repeats_and_does_not_depend_on_how_work_is_cut(model):
    options = {"max_new_tokens": 12, "temperature": 1.5, "top_p": 0.9}
    first = tokens(run(model, seed=3, **options))
    assert tokens(run(model, seed=3, **options)) == first
    assert tokens(run(model, seed=3, limit=2, **options)) == first
    assert tokens(run(model, seed=4, **options)) != first
    assert tokens(run(model, **options)) != tokens(run(model, **options))


def test_equal_prompts_get_different_samples(model):
    a, b = tokens(run(model, prompts=[[5], [5]], max_new_tokens=12, temperature=2.0, seed=1))
    assert a != b


def frequencies(logits, num_draws=4000, **params):
    sampler = Sampler(SamplingParams(**params), seed=0, index=0)
    drawn = [sampler.choose(np.log(np.array(logits, np.float32))) for _ in range(num_draws)]
    return np.bincount(drawn, minlength=len(logits)) / num_draws


def test_samples_follow_the_softmax_at_their_temperature():
    np.testing.assert_allclose(frequencies([0.1, 0.2, 0.7], temperature=1.0), [0.1, 0.2, 0.7], atol=0.03)
    cooler = np.array([0.01, 0.04, 0.49]) / 0.54
    np.testing.assert_allclose(frequencies([0.1, 0.2, 0.7], temperature=0.5), cooler, atol=0.03)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("temperature", [5e-324, 1e-310, 1e-300, 1e-30])
def test_temperatures_next_to_0_are_greedy(temperature):
    drawn = frequencies([0.1, 0.2, 0.7], num_draws=20, temperature=temperature, top_p=0.9)
    np.testing.assert_equal(drawn, [0, 0, 1])


def test_top_p_keeps_the_smallest_set_that_reaches_it():
    np.testing.assert_allclose(frequencies([0.1, 0.3, 0.6], temperature=1.0, top_p=0.85), [0, 1 / 3, 2 / 3], atol=0.03)
    np.testing.assert_allclose(frequencies([0.1, 0.3, 0.6], temperature=1.0, top_p=0.5), [0, 0, 1])
    np.testing.assert_allclose(frequencies([0.1, 0.3, 0.6], temperature=1.0, top_p=1e-9), [0, 0, 1])


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens is 0; it must be at least 1"),
        ({"temperature": -1.0}, "temperature is -1.0"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"top_p": 0.0}, "top_p is 0.0; it must be above 0"),
        ({"top_p": 1.1}, "top_p is 1.1"),
        ({"seed": -1}, "seed is -1"),
    ],
)
def test_impossible_sampling_is_refused(params, message):
    with pytest.raises(ValueError, match=message):
        SamplingParams(**params)


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([[1], []], "prompt 1 has no tokens"),
        ([[1, 384]], "prompt 0 has token ids outside 0..383"),
        ([[-1]], "prompt 0 has token ids outside"),
        ([[1] * 505], r"505 tokens and max_new_tokens 16 exceed .* max_position_embeddings 512"),
    ],
)
def test_impossible_prompts_are_refused(model, prompts, message):
    with pytest.raises(ValueError, match=message):
        run(model, prompts=prompts)


def test_a_limit_below_one_is_refused(model):
    with pytest.raises(ValueError, match="max_tokens_per_step is 0"):
        run(model, limit=0)
