"""Out of step is an error on every rank, never a wrong sum; what fails at start-up leaves the rest as it was."""

from tests.multi import step_bodies as bodies
from tests.ranks import run_cases, run_ranks

ENV = {"FDFUSION_CALL_TIMEOUT_S": "3"}


def test_ranks_out_of_step_are_told():
    interrupted, columns = run_cases(2, [bodies.interrupted, bodies.gather_of_unequal_columns], env=ENV)
    assert interrupted[1][0].startswith("KeyboardInterrupt")
    assert "a call was interrupted (KeyboardInterrupt): the ranks are out of step" in interrupted[1][1]
    for text in interrupted[0]:
        assert text.startswith(("PeerLost", "FusionError")), text
    for text in columns:
        assert "4 tokens x 10" in text and "4 tokens x 12" in text


def test_a_late_answer_is_not_taken_for_the_next():
    first, second = run_ranks(2, bodies.interrupted_on_the_cpu_side, env=ENV)
    assert second[0].startswith("KeyboardInterrupt")
    assert all("was interrupted in 'all_reduce' (KeyboardInterrupt)" in text for text in second[1:])
    assert all(text != "no error" for text in first)


def test_what_no_rank_may_take_for_another():
    forked, *dtypes = run_cases(
        2, [bodies.a_forked_child_closes, (bodies.different_dtypes, "shm"), (bodies.different_dtypes, "plain")], env=ENV
    )
    assert forked == [[11.0, 11.0]] * 2
    for told in dtypes[0]:
        assert "of 2 tokens x 8 float32" in told and "of 2 tokens x 8 bfloat16" in told
    for told in dtypes[1]:
        assert "paddle.float32" in told and "paddle.bfloat16" in told


def test_a_stage_waits_as_long_as_the_limit_says():
    first, second = run_ranks(2, bodies.a_slow_stage, env=ENV)
    assert first[0] == "sent"
    assert "global rank 0) did not come to 'stage boundary' within 3 s" in second[0]
    assert 3.0 <= float(second[1]) < 8.0


def test_what_fails_at_start_up_leaves_the_rest_as_it_was():
    cases = [bodies.second_user_disagrees, bodies.growth_fails, bodies.open_raises_then_works, bodies.strided_weight]
    second, growth, again, weights = run_cases(2, cases)
    for told, total in second:
        assert "num_max_tokens" in told and total == 11.0
    for sums, first, grown in growth:
        assert sums == [11.0, 11.0]
        assert first == "fused: fits the fused workspace (shm)"
        assert grown.startswith("plain: no fused backend for this group (shm: rank 1 of the group"), grown
    for told, total, state in again:
        assert "FDFUSION_OPEN_TIMEOUT_S='soon'" in told
        assert total == 11.0 and state == "fused: fits the fused workspace (shm)"
    assert max(error for errors in weights for error in errors) < 1e-4


def test_only_this_runs_memory_is_attached_to():
    (told,) = run_ranks(1, bodies.foreign_memory)
    assert all("is not the memory that rank 0 made for this run" in text for text in told), told
