"""A paged cache gives what one with a row of memory a sequence gives, wherever the blocks lie."""

import numpy as np
import pytest

from fastdeploy_fusion.layers import AttentionStep, KVCache, PackedBatch, PagedKVCache, PageTable, kv_cache
from tests.fake_tp import array, draw, tensor

HEADS, KV_HEADS, DIM = 4, 2, 8
STEPS = ({0: 5, 2: 9}, {1: 3, 0: 1, 2: 1}, {0: 1, 1: 1, 2: 1}, {2: 4, 1: 1}, {0: 1, 2: 1})


@pytest.fixture(params=["numpy", "Paddle operations"])
def kind(request, monkeypatch):
    if request.param != "numpy":
        monkeypatch.setattr(kv_cache.paddle, "get_device", lambda: "gpu:0")


def make(blocks, **options):
    pages = PageTable(num_slots=3, num_blocks=12, block_size=4)
    for slot, own in enumerate(blocks):
        pages.assign(slot, own)
    return PagedKVCache(pages, layers=[0, 1], kv_heads=KV_HEADS, head_dim=DIM, **options)


def outputs(cache, layer=1):
    """All steps' attention; each sequence's rows are its own whatever the cache."""
    cached, results = dict.fromkeys(range(3), 0), []
    for number, lengths in enumerate(STEPS):
        batch = PackedBatch(tuple(lengths), tuple(cached[s] for s in lengths), tuple(lengths.values()))
        q, k, v = (tensor(draw(batch.num_tokens, n, DIM, seed=number * 3 + n)) for n in (HEADS, KV_HEADS, KV_HEADS))
        step = AttentionStep(batch, cache, None)
        results.append(array(step.attend(layer, q, k, None if cache.latent_dim else v, 0.3)))
        for slot, length in lengths.items():
            cached[slot] += length
    return results


@pytest.mark.parametrize("latent_dim", [None, 6])
@pytest.mark.parametrize("blocks", [[[0, 1], [2, 7], [3, 4, 5, 6]], [[7, 2], [9, 10], [5, 11, 0, 1]]])
def test_it_equals_a_cache_of_slots(kind, blocks, latent_dim):
    options = {"latent_dim": latent_dim}
    plain = KVCache(layers=[0, 1], num_slots=3, max_tokens=16, kv_heads=KV_HEADS, head_dim=DIM, **options)
    for got, want in zip(outputs(make(blocks, **options)), outputs(plain), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_a_slot_is_used_again_and_reads_nothing_of_its_past_or_of_others():
    cache = make([[0, 1], [2, 7], [3, 4, 5, 6]])
    want = outputs(cache)
    for values in (*cache.keys.values(), *cache.values.values()):
        values[:, :, 32:] = np.nan  # blocks that nobody of these three holds
    for slot, own in enumerate([[4, 0], [6, 7], [1, 2, 3, 5]]):
        cache.pages.assign(slot, own)
    for got, expected in zip(outputs(cache), want, strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


def test_what_does_not_fit_is_refused():
    cache = make([[0], [1], [2]])
    for batch, words in (
        (PackedBatch((0,), (3,), (2,)), "5 tokens of slot 0 do not fit its 4"),
        (PackedBatch((3,), (0,), (1,)), "slot 3"),
        (PackedBatch((), (), ()), "no sequence"),
    ):
        with pytest.raises(ValueError, match=words):
            AttentionStep(batch, cache, None)
    for slot, own in ((0, [12]), (0, []), (3, [1]), (-1, [1])):
        with pytest.raises(ValueError, match="blocks"):
            cache.pages.assign(slot, own)
