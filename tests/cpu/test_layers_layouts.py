"""Rows dealt to context ranks, layers to stages, experts to ranks: pure, complete, each exactly once."""

import itertools

import numpy as np
import paddle
import pytest

from fastdeploy_fusion.config import ParallelConfig
from fastdeploy_fusion.layers import ContextSplit, ExpertPlacement, PackedBatch
from fastdeploy_fusion.layers.pipeline import stage_layers
from fastdeploy_fusion.models import build, load_config, registry
from fastdeploy_fusion.parallel import Parallel, as_parallel
from fastdeploy_fusion.topology import make_topology
from tests.fake_tp import FakeTp


class Rows:
    """One rank of a context group whose other ranks' rows are known beforehand."""

    def __init__(self, rank, size):
        self.rank, self.size, self.everything = rank, size, None

    def all_gather(self, tensor):
        assert list(tensor.shape) == list(self.everything[self.rank].shape)
        return self.everything


BATCHES = [
    PackedBatch((0,), (0,), (7,)),
    PackedBatch((2, 0, 1), (0, 5, 3), (8, 1, 5)),
    PackedBatch((0, 1, 2, 3), (9, 0, 0, 2), (1, 2, 4, 9)),
]


def splits_of(batch, num_ranks):
    return [ContextSplit(batch, Rows(rank, num_ranks)) for rank in range(num_ranks)]


@pytest.mark.parametrize("batch, num_ranks", list(itertools.product(BATCHES, (2, 3, 4))))
def test_every_row_is_computed_by_one_rank_at_its_own_position(batch, num_ranks):
    rows = paddle.arange(batch.num_tokens)
    positions = {}
    for split in splits_of(batch, num_ranks):
        taken = split.take(rows).tolist()
        assert len(taken) == split.local.num_tokens > 0 and taken == sorted(taken)
        for row, position in zip(taken, split.local.positions().tolist(), strict=True):
            assert row not in positions
            positions[row] = position
    assert [positions[row] for row in range(batch.num_tokens)] == batch.positions().tolist()


@pytest.mark.parametrize("batch, num_ranks", list(itertools.product(BATCHES, (2, 3))))
def test_gathered_rows_are_in_the_batchs_order(batch, num_ranks):
    whole = paddle.to_tensor(np.random.default_rng(0).standard_normal((batch.num_tokens, 4, 3)).astype(np.float32))
    splits = splits_of(batch, num_ranks)
    most = max(split.local.num_tokens for split in splits)
    padded = [np.zeros((most, 4, 3), np.float32) for _ in splits]
    for rows, split in zip(padded, splits, strict=True):
        rows[: split.local.num_tokens] = split.take(whole).numpy()
    for split in splits:
        split.group.everything = [paddle.to_tensor(rows) for rows in padded]
        np.testing.assert_array_equal(split.gather(split.take(whole)).numpy(), whole.numpy())
        keys, values = split.gather_kv(split.take(whole)[:, :1], split.take(whole)[:, 1:])
        np.testing.assert_array_equal(paddle.concat([keys, values], axis=1).numpy(), whole.numpy())


def test_single_tokens_and_single_ranks_are_not_cut():
    decoding, prompt = PackedBatch((0, 1), (4, 9), (1, 1)), PackedBatch((0,), (0,), (7,))
    for batch, num_ranks in ((decoding, 2), (prompt, 1), (prompt, 8)):
        split = ContextSplit(batch, Rows(0, num_ranks))
        rows = paddle.arange(batch.num_tokens)
        assert split.local is batch and split.take(rows) is rows and split.gather(rows) is rows


@pytest.mark.parametrize("num_layers, num_stages", [(4, 1), (4, 2), (3, 2), (92, 5), (7, 7)])
def test_stages_hold_consecutive_layers_of_nearly_equal_number(num_layers, num_stages):
    stages = [stage_layers(num_layers, stage, num_stages) for stage in range(num_stages)]
    assert [layer for stage in stages for layer in stage] == list(range(num_layers))
    sizes = [len(stage) for stage in stages]
    assert max(sizes) - min(sizes) <= 1 and sizes[0] == min(sizes)


@pytest.mark.parametrize("tp, ep", [(1, 1), (4, 1), (4, 2), (4, 4), (8, 2)])
def test_every_shard_of_every_expert_lies_on_one_rank(tp, ep):
    layout = ParallelConfig(tensor_parallel_size=tp, expert_parallel_size=ep)
    topology = make_topology(layout)
    placements = [ExpertPlacement.dealt(8, topology.place(rank), layout) for rank in range(tp)]
    held = [(expert, p.shard) for p in placements for expert in p.experts]
    assert sorted(held) == sorted(itertools.product(range(8), range(tp // ep)))


def layout_of(**sizes):
    """A ``Parallel`` of a layout in which this process stands for rank 0."""
    config = ParallelConfig(**sizes)
    tp = FakeTp(0, config.tensor_parallel_size)
    me = Parallel.around(FakeTp()).context
    return Parallel(config, make_topology(config).place(0), tp=tp, moe=tp, context=me, pipeline=me, replica=tp.group)


def test_experts_that_do_not_divide_are_refused_with_the_choices(data):
    config = load_config(data / "glm4_moe_a")
    with pytest.raises(ValueError, match=r"number of experts 8 is not divisible by expert_parallel_size 3.*1, 2, 4, 8"):
        ExpertPlacement.dealt(8, make_topology(ParallelConfig(3, 3)).place(0), ParallelConfig(3, 3))
    assert build(config, layout_of(tensor_parallel_size=4, expert_parallel_size=4)).layers[1].mlp is not None
    with pytest.raises(ValueError, match="pipeline_parallel_size 5 is more than the model's 4 layers"):
        stage_layers(4, 0, 5)


def test_a_model_says_which_axes_it_does_not_run_under(data, monkeypatch):
    config = load_config(data / "glm4_moe_a")
    with pytest.raises(ValueError, match="does not run with data-parallel attention"):
        build(config, layout_of(tensor_parallel_size=2, enable_dp_attention=True))

    class Plain:
        def __init__(self, config, tp, dtype):
            self.tp = tp

    monkeypatch.setattr(registry, "import_module", lambda *_: type("module", (), {"Glm4MoeForCausalLM": Plain}))
    tp = FakeTp(0, 2)
    model = build(config, tp)
    assert model.tp is tp and as_parallel(model.parallel) is model.parallel
    with pytest.raises(ValueError, match="not with expert_parallel_size 2"):
        build(config, layout_of(tensor_parallel_size=2, expert_parallel_size=2))
