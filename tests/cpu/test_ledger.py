"""Counting by site, and the one log line for each kind of refusal."""

import logging
import weakref

import paddle
import pytest

from fastdeploy_fusion import metrics
from fastdeploy_fusion.config import FusionConfig
from fastdeploy_fusion.errors import WorkspaceError
from fastdeploy_fusion.ledger import Ledger
from fastdeploy_fusion.policy import GroupState, Op, Path

ON = FusionConfig(enabled=True)
READY = GroupState(2, None, "shm", hidden_size=16, num_max_tokens=8, deterministic=True)
WEIGHT = paddle.ones([16])


def call(ledger, num_tokens, site="", op=Op.ADD_RMS_NORM):
    x = paddle.ones([num_tokens, 16])
    norm = op is Op.ADD_RMS_NORM
    return ledger.decide(op, x, x if norm else None, WEIGHT if norm else None, site)


def test_calls_are_counted_by_site_path_and_reason():
    ledger = Ledger(READY, ON, logs=True)
    for num_tokens, site in ((1, "a.o_proj"), (8, "a.o_proj"), (9, "a.o_proj"), (1, "b.down_proj"), (0, "a.o_proj")):
        call(ledger, num_tokens, site)
    call(ledger, 1, "embed", Op.ALL_REDUCE)
    fits, over = "fits the fused workspace", "over the token limit"
    assert ledger.site_counters() == {
        ("a.o_proj", "add_rms_norm", "fused", fits): 2,
        ("b.down_proj", "add_rms_norm", "fused", fits): 1,
        ("a.o_proj", "add_rms_norm", "plain", over): 1,
        ("a.o_proj", "add_rms_norm", "empty", "no tokens"): 1,
        ("embed", "all_reduce", "fused", fits): 1,
    }
    assert ledger.counters()["add_rms_norm", "fused", fits] == 3
    assert sum(ledger.counters().values()) == sum(ledger.site_counters().values()) == 6


def test_the_first_refusal_of_each_kind_is_logged_with_the_layout(caplog):
    caplog.set_level(logging.DEBUG)
    ledger = Ledger(READY, ON, logs=True)
    strided = paddle.ones([16, 32]).t()[:, ::1]
    ledger.decide(Op.ADD_RMS_NORM, strided, paddle.ones([32, 16]), WEIGHT, "model.layers.3.mlp.down_proj")
    for num_tokens in (9, 10, 32, 9):
        call(ledger, num_tokens)
    call(ledger, 9, op=Op.ALL_REDUCE)
    call(ledger, 1)
    lines = [record.getMessage() for record in caplog.records]
    assert lines == [
        "first add_rms_norm on the plain path (at model.layers.3.mlp.down_proj): over the token limit (32 > 8); "
        "input [32, 16] float32 on cpu with strides [1, 32], residual [32, 16] float32 on cpu, "
        "weight [16] float32 on cpu",
        "first all_reduce on the plain path: over the token limit (9 > 8); input [9, 16] float32 on cpu",
    ]


@pytest.mark.parametrize(("state", "config", "logs"), [(READY, FusionConfig(), True), (READY, ON, False)])
def test_settings_and_other_ranks_log_nothing(caplog, state, config, logs):
    caplog.set_level(logging.DEBUG)
    ledger = Ledger(state, config, logs=logs)
    assert call(ledger, 9).path is Path.PLAIN
    assert not caplog.records


def test_a_known_call_formats_no_text(monkeypatch):
    """The hot path: nothing of the module that makes text may run for a call that is known."""
    ledger = Ledger(READY, ON, logs=True)
    call(ledger, 9)
    for name in ("layout", "decide", "_check_operands", "_describe"):
        monkeypatch.setattr(f"fastdeploy_fusion.ledger.{name}", None)
    for _ in range(3):
        call(ledger, 9, "x")
    assert ledger.site_counters()["x", "add_rms_norm", "plain", "over the token limit"] == 3


def test_a_weight_is_not_kept_alive_and_may_be_cast_in_place():
    ledger = Ledger(READY, ON, logs=False)
    x, weight = paddle.ones([1, 16]), paddle.ones([16])
    for dtype, path in (("float32", Path.FUSED), ("bfloat16", Path.SUMMED), ("float32", Path.FUSED)):
        weight.cast_(dtype)
        assert ledger.decide(Op.ADD_RMS_NORM, x, x, weight, "").path is path
    gone = weakref.ref(weight)
    del weight
    assert gone() is None


def test_operands_that_no_path_takes_are_named():
    ledger, x = Ledger(READY, ON, logs=False), paddle.ones([1, 16])
    with pytest.raises(TypeError, match="weight is None"):
        ledger.decide(Op.ADD_RMS_NORM, x, x, None, "")
    with pytest.raises(ValueError, match="a single number"):
        ledger.decide(Op.ALL_REDUCE, paddle.to_tensor(1.0), None, None, "")


def test_closed_keeps_its_counts():
    ledger = Ledger(READY, ON, logs=True)
    call(ledger, 1, "s")
    ledger.close()
    with pytest.raises(WorkspaceError, match="open a new one"):
        call(ledger, 1)
    assert sum(ledger.counters().values()) == 1


class Counted:
    """A fusion as the exporter sees it."""

    def __init__(self, ledger, rank, ranks):
        self.site_counters, self.state, self.rank = ledger.site_counters(), ledger.state, rank
        self.group = type("Group", (), {"ranks": ranks})


def test_prometheus_text():
    ledger = Ledger(READY, ON, logs=False)
    call(ledger, 1, 'odd"name\\')
    call(ledger, 9, "z")
    fusion = Counted(ledger, 1, (2, 3))
    text = metrics.prometheus_text(fusion, fusion)
    assert text.endswith("\n") and text.count("# TYPE") == 3
    labels = 'rank="3",ranks="2,3"'
    assert (
        f'fdfusion_sums_total{{{labels},site="odd\\"name\\\\",op="add_rms_norm",path="fused",'
        'reason="fits the fused workspace"} 1\n'
    ) in text
    assert f'{labels},site="z",op="add_rms_norm",path="plain",reason="over the token limit"}} 1\n' in text
    assert f'fdfusion_workspace_ready{{{labels},backend="shm",reason=""}} 1\n' in text
    assert f"fdfusion_token_limit{{{labels}}} 8\n" in text
    assert len(text.splitlines()) == 6 + 4


def test_prometheus_text_says_why_there_is_no_workspace():
    fusion = Counted(Ledger(GroupState(2, "shm: rank 1 failed"), ON, logs=False), 0, (0, 1))
    text = metrics.prometheus_text(fusion)
    assert 'backend="plain",reason="shm: rank 1 failed"} 0\n' in text
