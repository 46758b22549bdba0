"""The decision: pure, and each refusal with its own reason."""

import dataclasses

import pytest

from fastdeploy_fusion.config import FusionConfig
from fastdeploy_fusion.policy import (
    Decision,
    GroupState,
    Op,
    Path,
    Reason,
    Request,
    decide,
    limit_tokens,
)

ON = FusionConfig(enabled=True)
READY = GroupState(2, None, "shm", hidden_size=64, num_max_tokens=8, deterministic=True)
NORM = Request(Op.ADD_RMS_NORM, (8, 64), "float32", "float32")


def test_a_call_that_fits_is_fused():
    assert decide(NORM, READY, ON) == Decision(Path.FUSED, Reason.FITS, "shm")


def change(value, **fields):
    return dataclasses.replace(value, **fields)


REFUSALS = [
    (NORM, READY, FusionConfig(), Reason.DISABLED),
    (NORM, change(READY, world_size=1), ON, Reason.ONE_RANK),
    (NORM, change(READY, unavailable="rank 1: no memory"), ON, Reason.UNAVAILABLE),
    (NORM, GroupState(2), ON, Reason.UNAVAILABLE),
    (change(NORM, shape=(64,)), READY, ON, Reason.NOT_2D),
    (change(NORM, dtype="float16", weight_dtype="float16"), change(READY, dtypes=("float32",)), ON, Reason.DTYPE),
    (change(NORM, dtype="bfloat16"), READY, ON, Reason.WEIGHT_DTYPE),
    (change(NORM, shape=(8, 32)), READY, ON, Reason.HIDDEN_SIZE),
    (change(NORM, shape=(8, 6)), change(READY, hidden_size=6), ON, Reason.ALIGNMENT),
    (change(NORM, shape=(9, 64)), READY, ON, Reason.TOKEN_LIMIT),
    (change(NORM, shape=(3, 3, 64)), READY, ON, Reason.TOKEN_LIMIT),
    (change(NORM, has_residual=False), READY, ON, Reason.NO_RESIDUAL),
    (change(NORM, has_weight_bias=True), change(READY, takes_weight_bias=False), ON, Reason.WEIGHT_BIAS),
    (NORM, change(READY, deterministic=False), change(ON, deterministic=True), Reason.NOT_DETERMINISTIC),
]
OF_THE_NORM = (Reason.WEIGHT_DTYPE, Reason.NO_RESIDUAL, Reason.WEIGHT_BIAS)


@pytest.mark.parametrize(("request_", "state", "config", "reason"), REFUSALS, ids=[r[3].name for r in REFUSALS])
def test_each_refusal_has_its_reason(request_, state, config, reason):
    decision = decide(request_, state, config)
    path = Path.SUMMED if reason in OF_THE_NORM else Path.PLAIN
    assert (decision.path, decision.reason) == (path, reason)


def test_the_sum_goes_through_the_workspace_as_far_as_sums_alone_pay():
    more_sums, fewer_sums = change(READY, all_reduce_max_tokens=20), change(READY, all_reduce_max_tokens=4)
    assert decide(change(NORM, shape=(9, 64)), more_sums, ON).path is Path.SUMMED
    assert decide(change(NORM, shape=(21, 64)), more_sums, ON).path is Path.PLAIN
    assert decide(change(NORM, shape=(8, 64)), fewer_sums, ON).path is Path.FUSED
    no_residual = change(NORM, has_residual=False)
    assert decide(change(no_residual, shape=(4, 64)), fewer_sums, ON).path is Path.SUMMED
    assert decide(change(no_residual, shape=(5, 64)), fewer_sums, ON) == Decision(Path.PLAIN, Reason.NO_RESIDUAL)


def test_every_reason_is_reached():
    reached = {reason for *_, reason in REFUSALS} | {Reason.FITS, Reason.NO_TOKENS}
    assert reached == set(Reason)


def test_no_tokens_needs_no_collective_whatever_else_is_wrong():
    for state in (READY, GroupState(2)):
        assert decide(change(NORM, shape=(0, 64)), state, ON).path is Path.EMPTY


def test_a_pure_all_reduce_needs_no_residual():
    assert decide(Request(Op.ALL_REDUCE, (8, 64), "float32", None, False), READY, ON).path is Path.FUSED


def test_leading_axes_count_as_tokens():
    assert decide(change(NORM, shape=(2, 4, 64)), READY, ON).path is Path.FUSED


def test_a_decision_says_why():
    text = str(decide(change(NORM, shape=(9, 64)), READY, ON))
    assert text == "plain: over the token limit (9 > 8)"


class TestTokenLimit:
    def test_the_users_number_wins(self):
        assert limit_tokens(change(ON, num_max_tokens=7), 90, 4, 4096, "bfloat16") == 7

    def test_on_hopper_it_falls_with_the_ranks(self):
        # vLLM's and TensorRT-LLM's tables: about 256 tokens at TP4 and 64 at TP8, hidden 4096.
        limits = [limit_tokens(ON, 90, ranks, 4096, "bfloat16") for ranks in (2, 4, 8)]
        assert limits == [2048, 256, 64]

    def test_it_is_bytes_not_tokens(self):
        assert limit_tokens(ON, 90, 4, 8192, "bfloat16") == 128
        assert limit_tokens(ON, 90, 4, 4096, "float32") == 128

    def test_unknown_devices_get_the_default(self):
        assert limit_tokens(ON, None, 2, 4096, "float32") == 2048
        assert limit_tokens(ON, 90, 16, 4096, "bfloat16") == 2048
