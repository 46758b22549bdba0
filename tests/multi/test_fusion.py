"""The core on real ranks: both paths give the reference's numbers, and every rank is told the same."""

import re

import pytest

from tests.multi import fusion_bodies as bodies
from tests.ranks import run_cases, run_ranks

TOLERANCE = {"float32": 2e-6, "bfloat16": 1e-2, "float16": 1.5e-3}


def check_parity(results):
    for result in results:
        for key, error in result["errors"].items():
            assert error <= TOLERANCE[key.split("/")[0]], (key, error)
        assert result["counters"] == results[0]["counters"]
    return results[0]["counters"]


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_both_paths_equal_the_reference(num_ranks):
    shm, limited, plain = run_cases(
        num_ranks,
        [(bodies.parity, 4096, "auto", None), (bodies.parity, 64, "auto", 3), (bodies.parity, 64, "plain", None)],
        timeout_s=150,
    )
    assert set(check_parity(shm)) == {
        "fused: fits the fused workspace",
        "summed: norm weight dtype differs from the activation dtype",
        "summed: no residual",
    }
    assert {"fused: fits the fused workspace", "plain: over the token limit"} <= set(check_parity(limited))
    assert set(check_parity(plain)) == {"plain: no fused backend for this group"}


def test_one_set_of_ranks_many_rules():
    special, layouts, closes = run_cases(2, [bodies.special_values, bodies.awkward_layouts, bodies.close_orders])
    assert special[0] == special[1] and special[0][0] == special[0][1], special
    assert layouts == [True, True]
    assert closes == [[True, 11.0, 11.0]] * 2


def test_in_deterministic_mode_a_rows_bits_do_not_depend_on_the_batch():
    """Four ranks: two numbers commute, whatever the order. Without the mode, gloo's order does depend on the size."""
    cases = [
        (bodies.row_bits, True, "float32"),
        (bodies.row_bits, True, "bfloat16"),
        (bodies.row_bits, False, "float32"),
    ]
    single, half, free = run_cases(4, cases, timeout_s=90)
    for result in (*single, *half):
        assert result == {"changed": 0, "paths": ["fused", "plain", "summed"]}
    assert all(result["changed"] > 0 for result in free)


def test_an_object_never_closed_leaves_no_trace():
    outcomes = run_ranks(2, bodies.never_closed, on_failure="observe")
    assert [o.code for o in outcomes] == [0, 0]
    assert all("Exception ignored" not in o.stderr and "Traceback" not in o.stderr for o in outcomes)


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("shape", "rank 0 .*1 tokens.*rank 1 .*2 tokens|rank 1 .*2 tokens.*rank 0 .*1 tokens"),
        ("op", "add_rms_norm.*all_reduce|all_reduce.*add_rms_norm"),
        ("plain shape", r"brings \[\[1, 8\].*brings \[\[2, 8\]"),
        ("config", "num_max_tokens is 4 on rank 0 and 5 on rank 1"),
        ("hidden", "hidden_size is 8 on rank 0 and 16 on rank 1"),
    ],
)
def test_ranks_that_disagree_are_all_told(case, words):
    for text in run_ranks(2, bodies.refusal, case, timeout_s=40):
        assert re.search(words, text), text


def test_every_group_adds_exactly_its_members():
    lists = [[0, 1], [2, 3], [0, 2], [1, 3], [0, 1, 2, 3], [1, 2, 3], [3]]
    results = run_ranks(4, bodies.sums_by_group, lists, 3, timeout_s=90)
    for rank, values in enumerate(results):
        want = [sum(10.0**r for r in members) if rank in members else None for members in lists]
        assert values == want * 3, (rank, values)
