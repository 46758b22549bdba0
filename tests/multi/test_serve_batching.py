"""Requests that join and leave a busy engine get the tokens that they would get alone, on any ranks, fused or not."""

import pytest

from tests.ranks import run_cases
from tests.references import load_reference

BODY = "tests.multi.serve_bodies:batched_equals_alone"
TP = {"tensor_parallel_size": 2}
CASES = {
    1: [(name, False, {}) for name in ("glm4_moe_a", "glm4_moe_b", "nemotron_h_b")],
    2: [
        *[(name, fused, TP) for name in ("glm4_moe_a", "glm4_moe_b") for fused in (False, True)],
        ("deepseek_v3_b", True, TP),
        ("nemotron_h_b", True, TP),
        ("glm4_moe_a", True, {**TP, "expert_parallel_size": 2}),
        ("glm4_moe_a", False, {"pipeline_parallel_size": 2}),
        ("glm4_moe_a", False, {"context_parallel_size": 2}),
    ],
}


@pytest.mark.parametrize("num_ranks", CASES)
def test_batched_equals_alone(data, num_ranks):
    cases = CASES[num_ranks]
    results = run_cases(num_ranks, [(BODY, str(data / name), *how) for name, *how in cases], timeout_s=150)
    for case, (first, *_) in zip(cases, results, strict=True):
        (name, fused, layout), (batched, alone, paths) = case, first
        assert batched == alone, case
        assert paths == (["fused" if fused else "plain"] if layout.get("tensor_parallel_size") else []), case
        if name == "glm4_moe_a":
            greedy = load_reference(data / name)[2]
            assert batched == [tokens[:12] for tokens in greedy] * 2
