"""Latent attention equals attention over expanded keys and values; YaRN, interleaved rotation and softmax routing."""

import math

import numpy as np
import paddle
import pytest

from fastdeploy_fusion.layers import (
    AttentionStep,
    KVCache,
    LatentAttention,
    LatentSizes,
    PackedBatch,
    RotaryEmbedding,
    SoftmaxRouter,
    YarnScaling,
    kv_cache,
    ops,
)
from fastdeploy_fusion.partial import PartialSum
from tests.fake_tp import FakeTp, array, draw, fill, ranks, tensor

HIDDEN, HEADS = 12, 4
SIZES = LatentSizes(q_lora_rank=6, kv_lora_rank=5, qk_nope_head_dim=3, qk_rope_head_dim=4, v_head_dim=2)


def attention(tp, stored, q_lora_rank=6):
    sizes = LatentSizes(q_lora_rank, *[getattr(SIZES, n) for n in list(SIZES.__dataclass_fields__)[1:]])
    made = LatentAttention(HIDDEN, HEADS, sizes, 1e-6, tp=tp, prefix="a", layer_id=0, softmax_factor=1.5)
    fill(made, stored)
    return made


def new_cache(num_slots=2):
    s = SIZES
    return KVCache(
        layers=[0], num_slots=num_slots, max_tokens=8, kv_heads=1, head_dim=s.cached_dim, latent_dim=s.kv_lora_rank
    )


def expanded(stored, x, q_lora_rank):
    """The definition, in float64: every head's keys and values made from the latent vectors."""
    w = {key.removeprefix("a.").removesuffix(".weight"): v.astype(np.float64) for key, v in stored.items()}
    norm = lambda v, weight: v / np.sqrt((v * v).mean(-1, keepdims=True) + 1e-6) * weight  # noqa: E731
    q = x @ w["q_proj"].T if q_lora_rank is None else norm(x @ w["q_a_proj"].T, w["q_a_layernorm"]) @ w["q_b_proj"].T
    q = q.reshape(len(x), HEADS, 7)
    kv = x @ w["kv_a_proj_with_mqa"].T
    heads = (norm(kv[:, :5], w["kv_a_layernorm"]) @ w["kv_b_proj"].T).reshape(len(x), HEADS, 5)
    angles = np.arange(len(x))[:, None] / 100.0 ** (np.arange(0, 4, 2) / 4)
    turn = np.exp(1j * angles)[:, None]
    rotate = lambda v: (lambda z: np.concatenate([z.real, z.imag], -1))((v[..., ::2] + 1j * v[..., 1::2]) * turn)  # noqa: E731
    q = np.concatenate([q[..., :3], rotate(q[..., 3:])], -1)
    k = np.concatenate([heads[..., :3], np.repeat(rotate(kv[:, None, 5:]), HEADS, 1)], -1)
    scores = np.einsum("qhd,khd->hqk", q, k) * 7**-0.5 * 1.5
    scores = np.where(np.tril(np.ones((len(x), len(x)), bool)), scores, -np.inf)
    p = np.exp(scores - scores.max(-1, keepdims=True))
    out = np.einsum("hqk,khd->qhd", p / p.sum(-1, keepdims=True), heads[..., 3:])
    return out.reshape(len(x), -1) @ w["o_proj"].T


@pytest.mark.parametrize("kind", ["numpy", "Paddle operations"])
@pytest.mark.parametrize("q_lora_rank", [6, None])
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_it_is_attention_over_expanded_keys_and_values(num_ranks, q_lora_rank, kind, monkeypatch):
    if kind != "numpy":
        monkeypatch.setattr(kv_cache.paddle, "get_device", lambda: "gpu:0")
    stored, x = {}, draw(6, HIDDEN)
    total = 0
    for tp in ranks(num_ranks, defers=num_ranks > 1):
        made, cache = attention(tp, stored, q_lora_rank), new_cache()
        pieces = []
        for first, end in ((0, 4), (4, 5), (5, 6)):  # a prompt, then token by token, in the second slot
            step = AttentionStep(
                PackedBatch((1,), (first,), (end - first,)), cache, RotaryEmbedding(4, 100.0, interleaved=True)
            )
            out = made(tensor(x[first:end]), step)
            pieces.append(array(out.take() if isinstance(out, PartialSum) else out))
        total = total + np.concatenate(pieces)
        assert not cache.values and cache.keys[0].shape[-1] == SIZES.cached_dim
    np.testing.assert_allclose(total, expanded(stored, x, q_lora_rank), rtol=1e-3, atol=1e-5)


def test_per_head_matrices_are_the_same_on_every_device(monkeypatch):
    x, weight = draw(3, 2, 4), draw(2, 4, 5)
    want = np.einsum("rhn,hnm->rhm", x, weight)
    for turned, transpose in ((weight, False), (weight.swapaxes(1, 2).copy(), True)):
        np.testing.assert_allclose(array(ops.per_head(tensor(x), tensor(turned), transpose=transpose)), want, rtol=1e-5)
    assert ops.per_head(tensor(x, "bfloat16"), tensor(weight, "bfloat16")).dtype == paddle.bfloat16


def test_yarn_keeps_fast_frequencies_and_stretches_slow_ones():
    yarn = YarnScaling(factor=40.0, original_max_positions=4096, mscale=1.0, mscale_all_dim=1.0)
    plain, stretched = RotaryEmbedding(64, 10000.0), RotaryEmbedding(64, 10000.0, yarn=yarn)
    ratio = plain.frequencies / stretched.frequencies
    np.testing.assert_allclose(ratio[:10], 1, rtol=1e-6)
    np.testing.assert_allclose(ratio[24:], 40, rtol=1e-5)
    assert (np.diff(ratio) >= -1e-4).all()
    assert yarn.rotation_factor == 1.0 and yarn.softmax_factor == pytest.approx((0.1 * math.log(40) + 1) ** 2)


def test_yarn_without_mscales_scales_the_rotation():
    yarn = YarnScaling(factor=4.0, original_max_positions=32)
    assert yarn.rotation_factor == pytest.approx(0.1 * math.log(4) + 1) and yarn.softmax_factor == 1.0
    cos, _ = RotaryEmbedding(8, 1e4, yarn=yarn).angles(np.array([0]))
    np.testing.assert_allclose(cos, yarn.rotation_factor, rtol=1e-6)
    assert YarnScaling(4.0, 32, attention_factor=0.5).rotation_factor == 0.5
    assert YarnScaling(1.0, 32).rotation_factor == 1.0


@pytest.mark.parametrize("normalise", [True, False])
def test_softmax_routing_takes_the_most_probable(normalise):
    router = SoftmaxRouter(4, 4, top_k=2, norm_topk_prob=normalise, prefix="gate")
    fill(router, {"gate.weight": np.diag(np.log([0.1, 0.4, 0.2, 0.3])).astype(np.float32)})
    weights, ids = router(paddle.ones([1, 4]))
    divisor = 0.7 if normalise else 1.0
    chosen = dict(zip(ids.tolist()[0], weights.tolist()[0], strict=True))
    assert chosen == pytest.approx({1: 0.4 / divisor, 3: 0.3 / divisor}, rel=1e-5)


def test_more_choices_than_experts_are_refused():
    with pytest.raises(ValueError, match=r"num_experts_per_tok 5 is outside 1\.\.4"):
        SoftmaxRouter(4, 4, top_k=5, prefix="gate")


def test_heads_that_do_not_split_are_refused():
    with pytest.raises(ValueError, match="num_attention_heads 4 is not divisible by tensor_parallel_size 3"):
        attention(FakeTp(0, 3), {})
