"""Linear layers: the ranks' parts together are the whole matrix, every sum has one owner, sizes are checked early."""

import numpy as np
import paddle
import pytest

from fastdeploy_fusion.layers import (
    ColumnParallelLinear,
    GatedMLP,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from fastdeploy_fusion.partial import PartialSum
from fastdeploy_fusion.sites import fusable
from tests.fake_tp import FakeTp, array, draw, fill, ranks, tensor

SIZES = [1, 2, 4]


def assert_close(got, want):
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("world_size", SIZES)
def test_row_parallel_shares_add_up_with_the_bias_once(world_size):
    stored, x = {}, draw(3, 8)
    total = 0.0
    for tp in ranks(world_size):
        layer = RowParallelLinear(8, 6, tp=tp, prefix="o", with_bias=True)
        fill(layer, stored)
        total = total + array(layer(tensor(x[:, layer.columns])))
        assert tp.reduced == [[3, 6]]
    assert_close(total, x @ stored["o.weight"].T + stored["o.bias"])


@pytest.mark.parametrize("world_size", SIZES)
def test_column_parallel_parts_are_columns_in_rank_order(world_size):
    stored, x = {}, draw(3, 8)
    parts = []
    for tp in ranks(world_size):
        layer = ColumnParallelLinear(8, 12, tp=tp, prefix="m.q", with_bias=True)
        fill(layer, stored)
        parts.append(array(layer(tensor(x))))
        assert not tp.reduced
    assert_close(np.concatenate(parts, -1), x @ stored["m.q.weight"].T + stored["m.q.bias"])


def test_gather_output_asks_tp_for_all_columns():
    layer = ColumnParallelLinear(8, 12, tp=FakeTp(0, 2), prefix="q", gather_output=True)
    fill(layer)
    assert list(layer(tensor(draw(3, 8))).shape) == [3, 12]


@pytest.mark.parametrize("world_size", SIZES)
def test_merged_columns_hold_this_ranks_part_of_each(world_size):
    stored, x = {}, draw(2, 8)
    for tp in ranks(world_size):
        layer = MergedColumnParallelLinear(8, [4, 8], tp=tp, prefix="mlp.gate_up", shard_keys=["gate", "up"])
        fill(layer, stored)
        got = np.split(array(layer(tensor(x))), [4 // world_size], -1)
        for part, name in zip(got, ("gate", "up"), strict=True):
            whole = x @ stored[f"mlp.{name}.weight"].T
            assert_close(part, np.split(whole, world_size, -1)[tp.rank])


@pytest.mark.parametrize(("world_size", "kv_heads"), [(1, 2), (2, 2), (4, 2), (4, 1), (2, 8)])
def test_qkv_holds_whole_heads_and_repeats_scarce_kv_heads(world_size, kv_heads):
    heads, dim, stored, x = 8, 4, {}, draw(2, 8)
    for tp in ranks(world_size):
        layer = QKVParallelLinear(8, dim, heads, kv_heads, tp=tp, prefix="attn.qkv_proj", with_bias=True)
        fill(layer, stored)
        q, k, v = np.split(
            array(layer(tensor(x))).reshape(2, -1, dim),
            [layer.local_heads, layer.local_heads + layer.local_kv_heads],
            axis=1,
        )
        whole = {
            n: (x @ stored[f"attn.{n}_proj.weight"].T + stored[f"attn.{n}_proj.bias"]).reshape(2, -1, dim)
            for n in "qkv"
        }
        own = range(tp.rank * heads // world_size, (tp.rank + 1) * heads // world_size)
        assert_close(q, whole["q"][:, own])
        # Every local query head finds its kv head where grouped attention will look for it.
        group = layer.local_heads // layer.local_kv_heads
        for i, head in enumerate(own):
            assert_close(k[:, i // group], whole["k"][:, head // (heads // kv_heads)])
            assert_close(v[:, i // group], whole["v"][:, head // (heads // kv_heads)])


def test_replicated_linear_is_whole_on_every_rank():
    layer, x = ReplicatedLinear(8, 3, prefix="gate", with_bias=True), draw(2, 8)
    stored = fill(layer)
    assert_close(array(layer(tensor(x))), x @ stored["gate.weight"].T + stored["gate.bias"])


@pytest.mark.parametrize("world_size", SIZES)
def test_gated_mlp_shares_add_up(world_size):
    stored, x = {}, draw(3, 8)
    total = 0.0
    for tp in ranks(world_size):
        layer = GatedMLP(8, 16, tp=tp, prefix="mlp")
        fill(layer, stored)
        total = total + array(layer(tensor(x)))
    gate, up = (x @ stored[f"mlp.{name}_proj.weight"].T for name in ("gate", "up"))
    assert_close(total, (gate / (1 + np.exp(-gate)) * up) @ stored["mlp.down_proj.weight"].T)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_sixteen_bit_layers_compute_in_float32_and_round_once(dtype):
    layer, x = RowParallelLinear(256, 4, tp=FakeTp(), prefix="o", dtype=dtype), tensor(draw(2, 256), dtype)
    fill(layer)
    out = layer(x)
    exact = tensor(array(x) @ array(layer.weight).T)
    assert out.dtype == x.dtype
    assert (array(out) == array(exact.astype(dtype))).mean() > 0.9
    np.testing.assert_allclose(array(out), array(exact), rtol=2**-8)


def test_a_marked_site_defers_only_when_tp_does():
    for defers, kind in ((True, PartialSum), (False, paddle.Tensor)):
        tp = FakeTp(0, 2, defers=defers)
        layer = RowParallelLinear(8, 6, tp=tp, prefix=fusable("a.o_proj"))
        assert isinstance(layer(tensor(draw(2, 4))), kind)
        assert len(tp.reduced) == (0 if defers else 1)


def test_an_unmarked_site_reduces_and_a_raw_one_does_not():
    tp = FakeTp(0, 2, defers=True)
    RowParallelLinear(8, 6, tp=tp, prefix="o")(tensor(draw(2, 4)))
    RowParallelLinear(8, 6, tp=tp, prefix="o", reduce_results=False)(tensor(draw(2, 4)))
    assert len(tp.reduced) == 1


def test_checkpoint_names_do_not_depend_on_marks_or_ranks():
    keys = set()
    for prefix in ("model.layers.3.self_attn.o_proj", fusable("model.layers.3.self_attn.o_proj")):
        for tp in ranks(2, defers=True):
            specs = RowParallelLinear(8, 6, tp=tp, prefix=prefix, with_bias=True).checkpoint_tensors()
            keys.add(tuple((spec.key, spec.shape) for spec in specs))
    stem = "model.layers.3.self_attn.o_proj"
    assert keys == {((f"{stem}.weight", (6, 8)), (f"{stem}.bias", (6,)))}


def test_a_sum_has_one_owner():
    with pytest.raises(ValueError, match=r"'a.o' is marked fusable and has reduce_results=False.*drop the mark"):
        RowParallelLinear(8, 6, tp=FakeTp(), prefix=fusable("a.o"), reduce_results=False)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda tp: RowParallelLinear(10, 6, tp=tp, prefix="o"), r"input size of 'o' 10 .* 4; choose.*1, 2, 5, 10"),
        (lambda tp: ColumnParallelLinear(8, 6, tp=tp, prefix="q"), r"output size of 'q' 6 is not divisible"),
        (lambda tp: GatedMLP(8, 6, tp=tp, prefix="mlp"), r"'mlp.gate_proj' 6 is not divisible .* 4"),
        (
            lambda tp: QKVParallelLinear(8, 4, 2, 2, tp=tp, prefix="qkv"),
            r"tensor_parallel_size 4 is larger than num_at",
        ),
        (lambda tp: QKVParallelLinear(8, 4, 6, 2, tp=tp, prefix="qkv"), r"num_attention_heads 6 is not divisible"),
        (
            lambda tp: QKVParallelLinear(8, 4, 12, 3, tp=tp, prefix="qkv"),
            r"num_key_value_heads 3 is neither.*\[1, 3, 6",
        ),
        (lambda tp: QKVParallelLinear(8, 4, 8, 3, tp=tp, prefix="qkv"), r"8 is not a positive multiple of .* 3"),
        (lambda tp: MergedColumnParallelLinear(8, [8], tp=tp, prefix="p", shard_keys=["a", "b"]), "one size a key"),
        (lambda tp: ReplicatedLinear(8, 0, prefix="g"), "must be positive"),
    ],
)
def test_sizes_that_do_not_split_are_refused_at_construction(make, message):
    with pytest.raises(ValueError, match=message):
        make(FakeTp(0, 4))
