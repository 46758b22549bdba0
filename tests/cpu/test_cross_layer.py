"""A layer's last sum crosses into the next one: every reader that forgets to complete it fails with a TypeError."""

import dataclasses
import re
from pathlib import Path

import numpy as np
import paddle
import pytest

from fastdeploy_fusion.layers import (
    DecoderLayer,
    GatedMLP,
    MixerLayer,
    PackedBatch,
    ParallelLMHead,
    RowParallelLinear,
    complete,
    ops,
)
from fastdeploy_fusion.models import build, load_config, load_model
from fastdeploy_fusion.parallel import Parallel
from fastdeploy_fusion.partial import PartialSum
from fastdeploy_fusion.sites import fusable
from tests.fake_tp import FakeTp, fill

HIDDEN = 8
ROOT = Path(__file__).resolve().parents[2]


class Doubling(RowParallelLinear):
    """A block that owes a sum, whatever it is called with."""

    def forward(self, x, step=None):
        return super().forward(x)


def owing(tp, prefix="block"):
    return Doubling(HIDDEN * tp.world_size, HIDDEN, tp=tp, prefix=fusable(prefix))


@pytest.fixture(params=[DecoderLayer, MixerLayer])
def crossing(request):
    """``(hidden, residual)`` as a layer of two ranks that defer returns them."""
    tp = FakeTp(0, 2, defers=True)
    if request.param is DecoderLayer:
        layer = DecoderLayer(HIDDEN, 1e-5, owing(tp, "attention"), owing(tp), tp=tp, prefix="layer", layer_id=0)
    else:
        layer = MixerLayer(HIDDEN, 1e-5, owing(tp), reads=None, tp=tp, prefix="layer", layer_id=0)
    fill(layer)
    hidden, residual = layer(paddle.ones([3, HIDDEN]), None, None)
    assert isinstance(hidden, PartialSum) and not tp.reduced
    return hidden, residual


FORGETFUL = {
    "auxiliary stream: hidden + residual": lambda hidden, residual: hidden + residual,
    "auxiliary stream: residual + hidden": lambda hidden, residual: residual + hidden,
    "auxiliary stream: ops.add": lambda hidden, residual: ops.add(hidden, residual),
    "early exit: the head": lambda hidden, _: ParallelLMHead(16, HIDDEN, tp=FakeTp(), prefix="head")(hidden),
    "early exit: the last row": lambda hidden, _: hidden[-1],
    "another block": lambda hidden, _: GatedMLP(HIDDEN, HIDDEN, tp=FakeTp(), prefix="mlp")(hidden),
    "a boundary: contiguous bytes": lambda hidden, _: hidden.contiguous(),
    "a log: values": lambda hidden, _: hidden.numpy(),
    "a cast": lambda hidden, _: ops.cast(hidden, paddle.bfloat16),
    "a reshape": lambda hidden, _: hidden.reshape([-1]),
}


@pytest.mark.parametrize("use", FORGETFUL.values(), ids=FORGETFUL.keys())
def test_a_reader_that_forgets_to_complete_fails(crossing, use):
    with pytest.raises(TypeError, match=r"a PartialSum is not a tensor.*call complete\(\)"):
        use(*crossing)


def test_asking_for_what_a_tensor_has_says_no(crossing):
    hidden, _ = crossing
    assert not hasattr(hidden, "place") and getattr(hidden, "numpy", None) is None


def test_complete_takes_both(crossing):
    hidden, residual = crossing
    raw = hidden._tensor
    assert complete(hidden) is raw and complete(residual) is residual


def test_the_sum_can_be_kept_from_crossing_for_measurements():
    tp = FakeTp(0, 2, defers=True)
    layer = DecoderLayer(HIDDEN, 1e-5, owing(tp, "attention"), owing(tp), tp=tp, prefix="layer", layer_id=0)
    layer.crosses = False
    fill(layer)
    hidden, _ = layer(paddle.ones([3, HIDDEN]), None, None)
    assert not isinstance(hidden, PartialSum) and tp.reduced == [[3, HIDDEN]]


@pytest.mark.parametrize("name", ["glm4_moe_b", "qwen3_moe_a", "deepseek_v3_a", "nemotron_h_a"])
def test_every_sum_of_a_model_reaches_a_norm(data, name):
    """Only the embedding is reduced by itself; and the names of weights don't tell whether sums are fused."""
    config = load_config(data / name)
    tp = FakeTp(0, 2, defers=True)
    model = build(config, tp)
    fill(model)
    model(paddle.arange(3), PackedBatch((0,), (0,), (3,)), model.new_cache(1, 3))
    sums = config.num_hidden_layers * (1 if config.mixers else 2)
    assert len(tp.normed) == sums and tp.reduced == [[3, config.hidden_size]]
    names = [[(s.key, s.shape) for s in m.checkpoint_tensors()] for m in (model, build(config, FakeTp(0, 2)))]
    assert names[0] == names[1]


def test_the_guides_model_runs_and_all_its_sums_reach_a_norm(data):
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/adding_a_model.md").read_text(), re.DOTALL)
    names = {}
    exec(code, names)
    config = dataclasses.replace(load_config(data / "qwen3_moe_a"), moe=None)
    tp = FakeTp(0, 2, defers=True)
    model = names["Qwen3ForCausalLM"](config, Parallel.around(tp))
    fill(model)
    model(paddle.arange(3), PackedBatch((0,), (0,), (3,)), model.new_cache(1, 3))
    assert len(tp.normed) == 2 * config.num_hidden_layers and len(tp.reduced) == 1


@pytest.fixture
def model(data):
    return load_model(data / "qwen3_moe_a", FakeTp(), progress=False)


def run(model, **options):
    return model(paddle.arange(4), PackedBatch((0,), (0,), (4,)), model.new_cache(1, 4), **options)


def test_streams_are_those_between_the_layers(model):
    states, streams = run(model, aux_layer_ids=[3, 0, 2])
    np.testing.assert_array_equal(states.numpy(), run(model).numpy())
    assert len(streams) == 3
    np.testing.assert_array_equal(streams[0].numpy(), model.embed_tokens(paddle.arange(4)).numpy())
    for stream, exited in ((streams[1], run(model, exit_layer=2)), (streams[2], states)):
        np.testing.assert_allclose(model.norm(stream)[0].numpy(), exited.numpy(), rtol=1e-6)
    assert run(model, aux_layer_ids=[])[1] == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"exit_layer": 0}, "exit_layer is 0; it must be 1 to 3"),
        ({"exit_layer": 4}, "exit_layer is 4; it must be 1 to 3"),
        ({"aux_layer_ids": [-1]}, r"aux_layer_ids \[-1\] are not all within 0 to 3"),
        ({"aux_layer_ids": [3], "exit_layer": 2}, r"aux_layer_ids \[3\] are not all within 0 to 2"),
    ],
)
def test_layers_that_are_not_there_are_refused(model, options, message):
    with pytest.raises(ValueError, match=message):
        run(model, **options)
