"""Attention over packed ragged tokens equals attention of each sequence alone, written out."""

import numpy as np
import paddle
import pytest

from fastdeploy_fusion.layers import AttentionStep, KVCache, PackedBatch, RotaryEmbedding, attention, kv_cache
from tests.fake_tp import array, draw, tensor

HEADS, KV_HEADS, DIM = 4, 2, 8


def make_cache(num_slots=4, max_tokens=16, **options):
    return KVCache(layers=[0], num_slots=num_slots, max_tokens=max_tokens, kv_heads=KV_HEADS, head_dim=DIM, **options)


def alone(q, k, v):
    """Causal grouped-query attention of the last ``len(q)`` tokens of one sequence, in float64."""
    out = np.zeros((len(q), HEADS, DIM))
    for i in range(len(q)):
        seen = len(k) - len(q) + i + 1
        for h in range(HEADS):
            scores = k[:seen, h // 2].astype(np.float64) @ q[i, h] * DIM**-0.5
            p = np.exp(scores - scores.max())
            out[i, h] = (p / p.sum()) @ v[:seen, h // 2]
    return out.reshape(len(q), -1)


def run(cache, batch, qkv):
    step = AttentionStep(batch, cache, RotaryEmbedding(DIM, 10000.0))
    packed = [tensor(np.concatenate(parts)) for parts in qkv]
    return np.split(array(step.attend(0, *packed, DIM**-0.5)), batch.ends[:-1])


@pytest.fixture(params=["numpy", "Paddle operations"])
def kind(request, monkeypatch):
    """Both ways to compute, on the same CPU: the second is what other devices run."""
    if request.param != "numpy":
        monkeypatch.setattr(kv_cache.paddle, "get_device", lambda: "gpu:0")
    return request.param


@pytest.mark.parametrize("block", [2, 256])
def test_packed_sequences_do_not_see_each_other_and_continue_from_the_cache(block, kind, monkeypatch):
    monkeypatch.setattr(attention, "QUERY_BLOCK", block)
    slots, totals = (2, 0, 3), (7, 3, 12)
    full = {
        s: [draw(n, heads, DIM, seed=s) for heads in (HEADS, KV_HEADS, KV_HEADS)]
        for s, n in zip(slots, totals, strict=True)
    }
    cache = make_cache()
    cached = dict.fromkeys(slots, 0)
    # Prompts, then a mixed batch in another order, then single tokens.
    for lengths in ({2: 5, 0: 1, 3: 4}, {3: 6, 2: 1}, {0: 1, 2: 1, 3: 1}, {0: 1, 3: 1}):  # the third: 2 and 3 in one go
        batch = PackedBatch(tuple(lengths), tuple(cached[s] for s in lengths), tuple(lengths.values()))
        pieces = [[full[s][i][cached[s] : cached[s] + n] for s, n in lengths.items()] for i in range(3)]
        for (s, n), got in zip(lengths.items(), run(cache, batch, pieces), strict=True):
            end = cached[s] + n
            want = alone(full[s][0][cached[s] : end], full[s][1][:end], full[s][2][:end])
            np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
            cached[s] = end


def test_rotary_turns_pairs_of_halves_and_leaves_the_rest():
    rotary = RotaryEmbedding(4, 100.0)
    positions = np.array([0, 3, 70])
    x = draw(3, 2, DIM)
    cos, sin = rotary.angles(positions)
    got = array(rotary.rotate(tensor(x), cos, sin))
    # What other devices run gives the same.
    np.testing.assert_allclose(array(rotary.rotate(tensor(x), *map(paddle.to_tensor, (cos, sin)))), got, atol=1e-6)
    for t, position in enumerate(positions):
        for i, frequency in enumerate((1.0, 0.1)):
            turn = np.exp(1j * position * frequency)
            want = (x[t, :, i] + 1j * x[t, :, i + 2]) * turn
            np.testing.assert_allclose(got[t, :, i], want.real, rtol=1e-4, atol=1e-5)
            np.testing.assert_allclose(got[t, :, i + 2], want.imag, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(got[:, :, 4:], x[:, :, 4:])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_sixteen_bit_attention_is_computed_in_float32(dtype):
    cache, batch = make_cache(dtype=dtype), PackedBatch((0,), (0,), (5,))
    q, k, v = (tensor(draw(5, heads, DIM), dtype) for heads in (HEADS, KV_HEADS, KV_HEADS))
    out = AttentionStep(batch, cache, RotaryEmbedding(DIM, 1e4)).attend(0, q, k, v, DIM**-0.5)
    assert out.dtype == q.dtype
    np.testing.assert_allclose(array(out), alone(array(q), array(k), array(v)), rtol=2**-7, atol=1e-3)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (((0,), (10,), (7,)), "17 tokens does not fit the cache's max_tokens 16"),
        (((4,), (0,), (1,)), r"slots \(4,\) are not all within the cache's 4 slots"),
        (((0, 0), (0, 1), (1, 1)), "hold one sequence twice"),
        (((0,), (0,), (0,)), "lengths of at least 1"),
        (((0, 1), (0,), (1,)), "one slot, one cached count and one length"),
        (((), (), ()), "holds no sequence"),
    ],
)
def test_batches_that_do_not_fit_are_refused(batch, message):
    with pytest.raises(ValueError, match=message):
        AttentionStep(PackedBatch(*batch), make_cache(), RotaryEmbedding(DIM, 1e4))


def test_odd_rotary_sizes_are_refused():
    with pytest.raises(ValueError, match="rotary_dim is 5; it must be even"):
        RotaryEmbedding(5, 1e4)
    with pytest.raises(ValueError, match="rope_theta is 0"):
        RotaryEmbedding(4, 0)
