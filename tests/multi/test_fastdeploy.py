"""The FastDeploy adapter on real ranks: its functions, and a model of FastDeploy's shape wired by it."""

import pytest

from tests.multi import fastdeploy_bodies as bodies
from tests.ranks import run_cases

MARKS = ("enable_all_reduce.", "enable_all_reduce_fusion.", "")


@pytest.fixture(scope="module")
def functions():
    cases = {"fused": (True, None), "limit 3": (True, 3), "flag off": (False, None)}
    found = run_cases(2, [(bodies.function, 2, *case) for case in cases.values()] + [bodies.wrong_group])
    return dict(zip([*cases, "wrong group"], found, strict=True))


@pytest.mark.parametrize(
    ("case", "paths"),
    [
        ("fused", ["empty", "fused", "summed"]),
        ("limit 3", ["empty", "fused", "plain", "summed"]),
        ("flag off", ["empty", "plain"]),
    ],
)
def test_always_the_right_numbers(functions, case, paths):
    for found in functions[case]:
        assert found["fused"] == (case != "flag off")
        assert found["paths"] == paths  # "summed" without a residual
        assert {key: values for key, values in found["sums"].items() if key[0] != "0"} == {
            f"{tokens}/{residual}": [[11.5 if residual else 11.0]] * 2
            for tokens in (1, 3, 40)
            for residual in (True, False)
        }
        assert max(found["norm"]) < 1e-5


def test_a_group_of_another_size_is_refused(functions):
    assert (
        functions["wrong group"]
        == ["tp_group is None, and the world has 2 ranks, but tensor_parallel_size is 3; pass the group of these"] * 2
    )


@pytest.fixture(scope="module")
def models():
    keys = [(mark, next_layer) for mark in MARKS for next_layer in (False, True)]
    cases = [(bodies.model, 2, *key, None) for key in keys] + [
        (bodies.model, 2, MARKS[0], False, 3),
        bodies.engine_norms,
    ]
    return dict(zip([*keys, "limit 3", "engine norms"], run_cases(2, cases), strict=True))


@pytest.mark.parametrize("next_layer", [False, True])
@pytest.mark.parametrize("mark", MARKS)
def test_a_wired_model_gives_what_the_engine_gives(models, mark, next_layer):
    attention = {f"model.layers.{i}.self_attn.o_proj": f"model.layers.{i}.post_attention_layernorm" for i in range(3)}
    dense = {"model.layers.0.mlp.down_proj": "model.layers.1.input_layernorm"} if next_layer else {}
    for found in models[mark, next_layer]:
        assert max(found["differences"]) < 1e-5
        assert found["sums"] == attention | dense
        # Three forwards; every sum that was left is fused, and no other is counted.
        assert found["counted"] == [["add_rms_norm", "fused", "fits the fused workspace", 3 * (3 + next_layer)]]
        assert found["engine_calls"] == 0
        assert found["skipped"]["model.layers.1.mlp.shared_experts.down_proj"] in (
            "its result is added to others before a norm sees it",
            "other layers are marked, and it is not",
        )


@pytest.mark.parametrize("mark", MARKS)
def test_weight_keys_lose_the_marks(models, mark):
    renamed = models[mark, False][0]["renamed"]
    if not mark:
        assert renamed == {}
        return
    assert renamed[f"model.layers.2.self_attn.{mark}o_proj.weight"] == "model.layers.2.self_attn.o_proj.weight"
    marked_norm = "model.layers.0.enable_all_reduce_fusion.input_layernorm.weight"
    assert renamed[marked_norm] == "model.layers.0.input_layernorm.weight"
    assert not any("enable_all_reduce" in clean for clean in renamed.values())


def test_over_the_limit_the_engines_norm_follows_a_complete_sum(models):
    for found in models["limit 3"]:
        assert max(found["differences"]) < 1e-5
        assert found["counted"] == [
            ["add_rms_norm", "fused", "fits the fused workspace", 3],
            ["all_reduce", "plain", "over the token limit", 6],
        ]
        assert found["engine_calls"] == 2


def test_special_norms_are_the_engines(models):
    first, second = models["engine norms"]
    assert first == second and first[0:8:2] == [1, 1, 1, 1] and first[-2:] == [-1.0, -2.0]
    assert len({round(value, 4) for value in first[1:8:2]}) == 1  # the same sum every time


def test_two_data_parallel_copies_of_two_ranks():
    cases = [(bodies.function, 2, True, None), (bodies.model, 2, MARKS[1], True, None)]
    functions, models = run_cases(4, cases, timeout_s=180)
    for rank, found in enumerate(functions):
        want = 11.5 if rank < 2 else 1100.5
        assert found["fused"] and found["sums"]["40/True"] == [[want]] * 2
    for found in models:
        assert max(found["differences"]) < 1e-5
        assert found["counted"] == [["add_rms_norm", "fused", "fits the fused workspace", 12]]
