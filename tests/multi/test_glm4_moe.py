"""GLM4-MoE on 1, 2 and 4 ranks against transformers' numbers: fused, on both paths, and unfused; reductions counted."""

from pathlib import Path

import numpy as np
import pytest

from tests.ranks import run_cases

DATA = Path(__file__).resolve().parents[1] / "data"
CHECKPOINTS = ("glm4_moe_a", "glm4_moe_b")
TOLERANCE = 2e-4
MODES = {
    "fused": {"enabled": True, "backend": "shm"},
    "both paths": {"enabled": True, "backend": "shm", "num_max_tokens": 3},
    "unfused": {"enabled": False},
}


def body(rank, num_ranks, name, mode):
    """Everything for one checkpoint and mode on one rank; the parent judges what comes back."""
    from fastdeploy_fusion import models
    from fastdeploy_fusion.config import FusionConfig
    from fastdeploy_fusion.fusion import AllReduceFusion
    from tests.references import load_reference, round_rotary_as_the_reference_did

    prompts, logits, greedy = load_reference(DATA / name)
    config = models.load_config(DATA / name)
    report = {"errors": {}, "greedy": {}, "forwards": 0}
    with AllReduceFusion.open(FusionConfig(**MODES[mode]), hidden_size=config.hidden_size) as tp:
        model = models.load_model(DATA / name, tp, progress=False)
        round_rotary_as_the_reference_did(model, DATA / name)
        forward = model.forward

        def counted(*args):
            report["forwards"] += 1
            return forward(*args)

        model.forward = counted
        for packed in (True, False):
            got = models.prompt_logits(model, prompts, packed=packed)
            errors = [float(np.abs(g - w).max() / np.abs(w).max()) for g, w in zip(got, logits, strict=True)]
            report["errors"]["packed" if packed else "one by one"] = max(errors)
        params = models.SamplingParams(max_new_tokens=16, ignore_eos=True)
        batches = {"packed": [prompts], "one by one": [[prompt] for prompt in prompts]}
        for how, groups in batches.items():
            answers = [result.token_ids for group in groups for result in models.generate(model, tp, group, params)]
            report["greedy"][how] = answers == greedy
        report["counters"] = [[*key, count] for key, count in tp.counters.items()]
        report["num_layers"] = config.num_hidden_layers
    return report


@pytest.fixture(scope="module", params=(1, 2, 4), ids=lambda n: f"tp{n}")
def reports(request):
    """(checkpoint, mode) -> the reports of all ranks, from one set of processes."""
    keys = [(name, mode) for name in CHECKPOINTS for mode in MODES]
    found = run_cases(request.param, [(body, *key) for key in keys], timeout_s=120)
    return request.param, dict(zip(keys, found, strict=True))


def test_logits_are_the_references(reports):
    _, by_case = reports
    for case, ranks in by_case.items():
        for rank, report in enumerate(ranks):
            assert max(report["errors"].values()) < TOLERANCE, (case, rank, report["errors"])


def test_greedy_tokens_are_the_references(reports):
    _, by_case = reports
    for case, ranks in by_case.items():
        for rank, report in enumerate(ranks):
            assert report["greedy"] == {"packed": True, "one by one": True}, (case, rank)


def test_every_sum_is_reduced_exactly_once(reports):
    num_ranks, by_case = reports
    for case, ranks in by_case.items():
        for report in ranks:
            sums = report["forwards"] * (1 + 2 * report["num_layers"]) if num_ranks > 1 else 0
            reductions = sum(count for *_, count in report["counters"])
            assert reductions == sums, (case, report["counters"])
            deferred = sum(count for op, *_, count in report["counters"] if op == "add_rms_norm")
            expected = report["forwards"] * 2 * report["num_layers"] if case[1] != "unfused" and num_ranks > 1 else 0
            assert deferred == expected, (case, report["counters"])


def test_the_paths_taken_are_the_modes(reports):
    num_ranks, by_case = reports
    expected = {"fused": {"fused"}, "both paths": {"fused", "plain"}, "unfused": {"plain"}}
    for (name, mode), ranks in by_case.items():
        for report in ranks:
            paths = {path for _, path, _, _ in report["counters"]}
            assert paths == (expected[mode] if num_ranks > 1 else set()), (name, mode, report["counters"])
