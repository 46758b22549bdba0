"""Layouts to groups: pure, complete, and in the documented order."""

import itertools

import pytest

from fastdeploy_fusion.config import ParallelConfig
from fastdeploy_fusion.topology import make_topology, why_not_fused


def test_tensor_parallel_ranks_are_neighbours_as_in_fastdeploy():
    topology = make_topology(ParallelConfig(tensor_parallel_size=2, data_parallel_size=2))
    assert topology.attention_tp == ((0, 1), (2, 3))
    assert topology.group_of("attention_tp", 3) == (2, 3)


def test_stages_are_slower_than_tensor_ranks_as_in_sglang():
    topology = make_topology(ParallelConfig(tensor_parallel_size=2, pipeline_parallel_size=2))
    assert topology.pipeline == ((0, 2), (1, 3))
    assert [topology.place(r).stage for r in range(4)] == [0, 0, 1, 1]


def test_neighbours_of_a_pipeline_are_pairs():
    topology = make_topology(ParallelConfig(tensor_parallel_size=2, pipeline_parallel_size=3))
    assert topology.boundaries == ((0, 2), (2, 4), (1, 3), (3, 5))
    assert make_topology(ParallelConfig(tensor_parallel_size=2)).boundaries == ()


def test_experts_over_parts_and_shards_owe_one_sum_over_the_product_group():
    topology = make_topology(ParallelConfig(tensor_parallel_size=4, expert_parallel_size=2))
    assert topology.moe == ((0, 1, 2, 3),) == topology.attention_tp
    assert topology.expert_parts == ((0, 1), (2, 3))
    assert [(p.expert_part, p.expert_shard) for p in map(topology.place, range(4))] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert topology.reduced_groups == ((0, 1, 2, 3),)


def test_context_ranks_hold_the_same_shards():
    topology = make_topology(ParallelConfig(tensor_parallel_size=2, context_parallel_size=2))
    assert topology.context == ((0, 2), (1, 3))
    assert topology.attention_tp == ((0, 1), (2, 3))


def test_data_parallel_attention_is_refused_with_its_reason():
    config = ParallelConfig(tensor_parallel_size=2, enable_dp_attention=True)
    assert "hold different tokens" in (why_not_fused(config) or "")
    assert make_topology(config).attention_tp == ((0,), (1,))
    assert why_not_fused(ParallelConfig(tensor_parallel_size=2)) is None


@pytest.mark.parametrize("sizes", list(itertools.product((1, 2), (1, 2), (1, 3), (2, 4))))
def test_every_name_deals_all_ranks_out_once(sizes):
    data, stages, context, tensor = sizes
    config = ParallelConfig(
        tensor_parallel_size=tensor,
        expert_parallel_size=2,
        context_parallel_size=context,
        pipeline_parallel_size=stages,
        data_parallel_size=data,
    )
    topology = make_topology(config)
    for name in ("attention_tp", "moe", "expert_parts", "context", "pipeline", "replica"):
        members = [rank for group in getattr(topology, name) for rank in group]
        assert sorted(members) == list(range(config.world_size)), name
    places = {topology.place(rank) for rank in range(config.world_size)}
    assert len(places) == config.world_size


def test_sizes_that_do_not_divide_are_refused_with_the_choices():
    with pytest.raises(ValueError, match="expert_parallel_size is 3 and must divide .* 4; choose one of 1, 2, 4"):
        ParallelConfig(tensor_parallel_size=4, expert_parallel_size=3)
    with pytest.raises(ValueError, match="context_parallel_size is 0"):
        ParallelConfig(context_parallel_size=0)
    with pytest.raises(ValueError, match="rank 4 is outside this layout of 4 ranks"):
        make_topology(ParallelConfig(tensor_parallel_size=4)).place(4)


def test_a_layout_prints_its_groups():
    text = str(make_topology(ParallelConfig(tensor_parallel_size=2, data_parallel_size=2)))
    assert text.splitlines()[0].startswith("4 ranks = data 2 x stages 1 x context 1 x tensor 2")
    assert "attention_tp  [0,1] [2,3]" in text
