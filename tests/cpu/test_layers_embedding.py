"""Embedding and head: the ranks' vocabularies together are the whole one, also when it does not divide."""

import numpy as np
import paddle
import pytest

from fastdeploy_fusion.layers import ParallelLMHead, VocabParallelEmbedding
from tests.fake_tp import FakeTp, array, draw, fill, ranks, tensor


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("vocab_size", "world_size"), [(12, 1), (12, 4), (10, 4), (5, 4), (7, 2)])
def test_rows_add_up_to_the_embedding(vocab_size, world_size, dtype):
    stored, ids = {}, np.arange(vocab_size)
    total = 0.0
    for tp in ranks(world_size):
        layer = VocabParallelEmbedding(vocab_size, 8, tp=tp, prefix="e", dtype=dtype)
        fill(layer, stored)
        total = total + array(layer(paddle.to_tensor(ids)))
        assert len(tp.reduced) == (world_size > 1)
    np.testing.assert_array_equal(total, array(tensor(stored["e.weight"], dtype)))


@pytest.mark.parametrize(("vocab_size", "world_size"), [(12, 1), (12, 4), (10, 4), (5, 4)])
def test_logits_of_all_ranks_side_by_side_are_the_whole_without_padding(vocab_size, world_size):
    stored, x = {}, draw(3, 8)
    heads = []
    for tp in ranks(world_size):
        heads.append(ParallelLMHead(vocab_size, 8, tp=tp, prefix="lm_head"))
        fill(heads[-1], stored)
    parts = [tensor(x @ array(head.weight).T) for head in heads]
    for head in heads:
        head.tp.all_gather = lambda _: paddle.concat(parts, axis=-1)
        np.testing.assert_allclose(array(head(tensor(x))), x @ stored["lm_head.weight"].T, rtol=1e-5, atol=1e-5)


def test_padding_rows_are_zero():
    layer = VocabParallelEmbedding(5, 8, tp=FakeTp(3, 4), prefix="e")
    fill(layer)
    np.testing.assert_array_equal(array(layer.weight), 0.0)


def test_a_tied_head_uses_the_embedding_and_reads_nothing():
    tp = FakeTp()
    embedding = VocabParallelEmbedding(12, 8, tp=tp, prefix="e")
    head = ParallelLMHead(12, 8, tp=tp, prefix="lm_head", tied_to=embedding)
    stored, x = fill(embedding), draw(2, 8)
    assert head.checkpoint_tensors() == []
    np.testing.assert_allclose(array(head(tensor(x))), x @ stored["e.weight"].T, rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="can't be tied"):
        ParallelLMHead(13, 8, tp=tp, prefix="lm_head", tied_to=embedding)


def test_empty_sizes_are_refused():
    with pytest.raises(ValueError, match=r"'e' is \[0, 8\]"):
        VocabParallelEmbedding(0, 8, tp=FakeTp(), prefix="e")
