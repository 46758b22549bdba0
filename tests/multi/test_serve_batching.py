"""Requests that join and leave a busy engine get the tokens that they would get alone, on any ranks, fused or not."""

import pytest

from tests.ranks import run_cases
from tests.references import load_reference

BODY = "tests.multi.serve_bodies:batched_equals_alone"
CASES = {
    1: [("glm4_moe_a", False), ("glm4_moe_b", False), ("nemotron_h_b", False)],
    2: [(name, fused) for name in ("glm4_moe_a", "glm4_moe_b") for fused in (False, True)]
    + [("deepseek_v3_b", True), ("nemotron_h_b", True)],
}


@pytest.mark.parametrize("num_ranks", CASES)
def test_batched_equals_alone(data, num_ranks):
    cases = CASES[num_ranks]
    results = run_cases(num_ranks, [(BODY, str(data / model), fused) for model, fused in cases], timeout_s=150)
    for (model, fused), (first, *_) in zip(cases, results, strict=True):
        batched, alone, paths = first
        assert batched == alone, (model, fused)
        assert paths == ([] if num_ranks == 1 else ["fused"] if fused else ["plain"]), (model, fused, paths)
        if model == "glm4_moe_a":
            greedy = load_reference(data / model)[2]
            assert batched == [tokens[:12] for tokens in greedy] * 2
