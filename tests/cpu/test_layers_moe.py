"""Routing chooses and weighs as noaux_tc says, and experts sum up alike however they are spread over ranks."""

import numpy as np
import paddle
import pytest

from fastdeploy_fusion.layers import ExpertPlacement, FusedMoE, GatedMLP, NoAuxTcRouter
from fastdeploy_fusion.partial import PartialSum
from fastdeploy_fusion.sites import fusable
from tests.fake_tp import FakeTp, array, draw, fill, ranks, tensor

HIDDEN, WIDTH, EXPERTS = 8, 16, 8


def sigmoid(x):
    return 1 / (1 + np.exp(-x.astype(np.float64)))


def route(scores, bias=None, **options):
    """Expert -> weight for one token whose sigmoid scores are given."""
    num = len(scores)
    router = NoAuxTcRouter(num, num, prefix="gate", **options)
    logits = np.log(np.array(scores) / (1 - np.array(scores)))
    stored = {
        "gate.weight": np.diag(logits).astype(np.float32),
        "gate.e_score_correction_bias": np.array(bias if bias is not None else [0.0] * num, np.float32),
    }
    fill(router, stored)
    weights, ids = router(paddle.ones([1, num]))
    assert str(weights.dtype) == "paddle.float32"
    return dict(zip(ids.tolist()[0], weights.tolist()[0], strict=True))


def test_the_bias_selects_but_does_not_weigh():
    chosen = route([0.9, 0.5, 0.4, 0.1], bias=[0, 0, 0, 1.0], top_k=2, norm_topk_prob=False)
    assert chosen == pytest.approx({3: 0.1, 0: 0.9}, rel=1e-5)


@pytest.mark.parametrize("scale", [1.0, 2.5])
@pytest.mark.parametrize("normalise", [True, False])
def test_weights_are_normalised_if_asked_and_scaled_once(normalise, scale):
    chosen = route([0.8, 0.2, 0.4, 0.1], top_k=2, norm_topk_prob=normalise, routed_scaling_factor=scale)
    divisor = 1.2 if normalise else 1.0
    assert chosen == pytest.approx({0: 0.8 / divisor * scale, 2: 0.4 / divisor * scale}, rel=1e-5)


def test_only_the_groups_with_the_best_two_experts_compete():
    # Expert 0 is the best of all, but its group's two best sum to less than the other groups'.
    scores = [0.90, 0.01, 0.50, 0.49, 0.60, 0.55, 0.02, 0.03]
    chosen = set(route(scores, top_k=3, n_group=4, topk_group=2))
    assert chosen == {4, 5, 2}


def test_a_negative_biased_score_still_beats_experts_of_other_groups():
    bias = [-2.0, -2.0, -2.0, -2.0, -3.0, -3.0, -3.0, -3.0]
    assert set(route([0.5] * 8, bias=bias, top_k=4, n_group=2, topk_group=1)) == {0, 1, 2, 3}


def test_the_bias_keeps_float32_precision():
    # 1/1024 apart near 30: equal in bfloat16, and the index order alone would choose expert 0.
    assert set(route([0.5, 0.5], bias=[30.0, 30.0 + 2**-10], top_k=1)) == {1}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top_k": 9}, r"num_experts_per_tok 9 is outside 1..8"),
        ({"top_k": 5, "n_group": 4, "topk_group": 2}, r"5 is outside 1..4"),
        ({"top_k": 1, "n_group": 3}, r"n_routed_experts 8 is not a multiple of n_group 3"),
        ({"top_k": 1, "n_group": 2, "topk_group": 3}, r"topk_group 3 is outside 1..n_group 2"),
        ({"top_k": 1, "n_group": 8}, r"n_group 8 leaves 1 expert a group"),
    ],
)
def test_impossible_routing_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        NoAuxTcRouter(HIDDEN, 8, prefix="gate", **options)


def make(tp, placement=None, shared=True, prefix="mlp.experts", dtype="float32", **options):
    router = NoAuxTcRouter(HIDDEN, EXPERTS, top_k=3, routed_scaling_factor=2.5, prefix="mlp.gate")
    both = GatedMLP(HIDDEN, WIDTH, tp=tp, prefix="mlp.shared", reduce_results=False, dtype=dtype) if shared else None
    sizes = (HIDDEN, WIDTH, EXPERTS)
    return FusedMoE(
        *sizes, tp=tp, prefix=prefix, router=router, shared=both, placement=placement, dtype=dtype, **options
    )


def swiglu_mlp(x, stored, prefix):
    gate, up = (x @ stored[f"{prefix}.{name}_proj.weight"].T.astype(np.float64) for name in ("gate", "up"))
    return (gate * sigmoid(gate) * up) @ stored[f"{prefix}.down_proj.weight"].T


def expected(x, stored, shared=True):
    """Token by token, expert by expert, in float64."""
    scores = sigmoid(x @ stored["mlp.gate.weight"].T)
    out = np.zeros(x.shape)
    for t, row in enumerate(scores):
        chosen = np.argsort(-(row + stored["mlp.gate.e_score_correction_bias"]))[:3]
        for expert in chosen:
            weight = 2.5 * row[expert] / row[chosen].sum()
            out[t] += weight * swiglu_mlp(x[t], stored, f"mlp.experts.{expert}")
    return out + (swiglu_mlp(x, stored, "mlp.shared") if shared else 0)


@pytest.mark.parametrize("num_tokens", [1, 2, 9])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_shards_of_all_experts_add_up_in_one_sum(world_size, num_tokens):
    stored, x, total = {}, draw(num_tokens, HIDDEN), 0.0
    for tp in ranks(world_size):
        layer = make(tp)
        fill(layer, stored)
        total = total + array(layer(tensor(x)))
        assert tp.reduced == [[num_tokens, HIDDEN]]
    np.testing.assert_allclose(total, expected(x, stored), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("num_tokens", [1, 9])
@pytest.mark.parametrize(("num_ranges", "num_shards"), [(4, 1), (2, 2), (8, 1)])
def test_ranges_of_experts_add_up_too(num_ranges, num_shards, num_tokens):
    stored, x, total = {}, draw(num_tokens, HIDDEN), 0.0
    size = EXPERTS // num_ranges
    for first in range(0, EXPERTS, size):
        for shard in range(num_shards):
            placement = ExpertPlacement(range(first, first + size), shard, num_shards)
            layer = make(FakeTp(), placement, shared=False)
            fill(layer, stored)
            total = total + array(layer(tensor(x)))
    np.testing.assert_allclose(total, expected(x, stored, shared=False), rtol=1e-4, atol=1e-5)


def test_every_rank_knows_all_names_wherever_the_experts_are():
    placements = [None, ExpertPlacement(range(0, 2), 0, 1), ExpertPlacement(range(2, 8), 0, 1)]
    keys = [[(s.key, s.shape) for s in make(FakeTp(), p).checkpoint_tensors()] for p in placements]
    assert keys[0] == keys[1] == keys[2]


def test_no_tokens_give_no_rows_and_still_one_sum():
    tp = FakeTp(0, 2)
    layer = make(tp)
    fill(layer)
    assert list(layer(tensor(draw(0, HIDDEN))).shape) == [0, HIDDEN]
    assert tp.reduced == [[0, HIDDEN]]


@pytest.mark.parametrize("num_tokens", [1, 5])
@pytest.mark.parametrize("shared", [True, False])
def test_bfloat16_experts_are_near_the_float32_ones(shared, num_tokens):
    layer, x = make(FakeTp(), shared=shared, dtype="bfloat16"), draw(num_tokens, HIDDEN)
    stored = fill(layer)
    out = layer(tensor(x, "bfloat16"))
    want = expected(array(tensor(x, "bfloat16")), stored, shared)
    assert str(out.dtype) == "paddle.bfloat16"
    np.testing.assert_allclose(array(out), want, atol=0.05 * np.abs(want).max())


def test_a_marked_block_owes_its_sum():
    tp = FakeTp(0, 2, defers=True)
    layer = make(tp, prefix=fusable("mlp.experts"))
    fill(layer)
    assert isinstance(layer(tensor(draw(2, HIDDEN))), PartialSum)
    assert not tp.reduced


@pytest.mark.parametrize(
    ("placement", "message"),
    [
        (ExpertPlacement(range(4, 9), 0, 1), r"range\(4, 9\) are no range within 8 experts"),
        (ExpertPlacement(range(0, 8, 2), 0, 1), r"give range\(first, end\)"),
        (ExpertPlacement(range(8), 2, 2), r"expert shard 2 is outside 0..1"),
        (ExpertPlacement(range(8), 0, 3), r"moe_intermediate_size of 'mlp.experts' 16 is not divisible"),
    ],
)
def test_impossible_placements_are_refused(placement, message):
    with pytest.raises(ValueError, match=message):
        make(FakeTp(), placement)


def test_experts_follow_parameters_that_get_new_memory():
    moe = FusedMoE(HIDDEN, WIDTH, EXPERTS, tp=FakeTp(), prefix="m", router=lambda x: ROUTED)
    fill(moe)
    x = tensor(draw(1, HIDDEN))
    before = array(moe(x))
    moe.to(dtype="float16")
    moe.to(dtype="float32")
    np.testing.assert_allclose(array(moe(x)), before, rtol=2e-2, atol=1e-3)
    for parameter in (moe.gate_up, moe.down):
        parameter.set_value(paddle.zeros_like(parameter))
    assert not array(moe(x)).any()


ROUTED = (paddle.ones([1, 2]) / 2, paddle.to_tensor([[1, 3]]))
