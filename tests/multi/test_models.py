"""All models on 1, 2 and 4 ranks against transformers' numbers: fused, on both paths, unfused; reductions counted."""

from pathlib import Path

import numpy as np
import pytest

from tests.multi.layout_bodies import run_cases_of
from tests.ranks import run_cases

DATA = Path(__file__).resolve().parents[1] / "data"
TOLERANCE = 2e-4
MODES = {
    "fused": {"enabled": True, "backend": "shm"},
    "both paths": {"enabled": True, "backend": "shm", "num_max_tokens": 3},
    "unfused": {"enabled": False},
}
SUMS_A_LAYER = {"glm4_moe_a": 2, "glm4_moe_b": 2, "qwen3_moe_a": 2, "deepseek_v3_a": 2, "nemotron_h_a": 1}
# Latent experts, one group, the older config; no q_lora, YaRN, biases, the older config.
VARIANTS = {"nemotron_h_b": 1, "deepseek_v3_b": 2}
LAYOUTS = {
    "deepseek_v3_a": {"tensor_parallel_size": 2, "context_parallel_size": 2},
    "nemotron_h_b": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "expert_parallel_size": 2},
}
CASES = [(name, mode) for name in SUMS_A_LAYER for mode in MODES] + [(name, "fused") for name in VARIANTS]


def run_model(rank, num_ranks, name, mode):
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
        # Token by token and greedy one by one take many forwards: one mode each, where both paths are gone through.
        ways = {"packed": {}, "one by one": {"packed": False}}
        if mode == "fused" and num_ranks < 4:
            ways["token by token"] = {"max_tokens_per_step": 1}
        for way, options in ways.items():
            chosen = slice(0, 3) if way == "token by token" else slice(None)
            got = models.prompt_logits(model, prompts[chosen], **options)
            errors = [float(np.abs(g - w).max() / np.abs(w).max()) for g, w in zip(got, logits[chosen], strict=True)]
            report["errors"][way] = max(errors)
        params = models.SamplingParams(max_new_tokens=16, ignore_eos=True)
        batches = {"packed": [prompts]}
        if mode == "both paths":
            batches["one by one"] = [[prompt] for prompt in prompts]
        for how, groups in batches.items():
            answers = [result.token_ids for group in groups for result in models.generate(model, tp, group, params)]
            report["greedy"][how] = answers == greedy
        report["counters"] = [[*key, count] for key, count in tp.counters.items()]
        report["num_layers"] = config.num_hidden_layers
    return report


def completed_values(rank, num_ranks, name):
    """Streams for draft models and early exits, fused and unfused: the largest differences, and what each reduced."""
    import paddle

    from fastdeploy_fusion import models
    from fastdeploy_fusion.config import FusionConfig
    from fastdeploy_fusion.fusion import AllReduceFusion
    from fastdeploy_fusion.layers import PackedBatch
    from tests.references import load_reference

    prompt = load_reference(DATA / name)[0][2]
    tokens, batch = paddle.to_tensor(np.array(prompt, np.int64)), PackedBatch((0,), (0,), (len(prompt),))
    config = models.load_config(DATA / name)
    values, sums = [], []
    for enabled in (True, False):
        with AllReduceFusion.open(FusionConfig(enabled=enabled), hidden_size=config.hidden_size) as tp:
            model = models.load_model(DATA / name, tp, progress=False)
            run = lambda **kw: model(tokens, batch, model.new_cache(1, len(prompt)), **kw)  # noqa: B023, E731
            every = range(config.num_hidden_layers + 1)
            states, streams = run(aux_layer_ids=every)
            sums.append(sum(tp.counters.values()))
            alike = tp.group.all_gather_object([float(s.astype("float64").sum()) for s in streams], "streams")
            assert all(theirs == alike[0] for theirs in alike)
            early = [run(exit_layer=i) for i in every[1:]]
            assert (early[-1].numpy() == states.numpy()).all() and (run().numpy() == states.numpy()).all()
            assert (streams[0].numpy() == model.embed_tokens(tokens).numpy()).all()
            values.append([t.numpy() for t in (states, *streams, *early)])
    errors = [float(np.abs(a - b).max() / np.abs(b).max()) for a, b in zip(*values, strict=True)]
    return {"error": max(errors), "sums": sums, "expected": 1 + config.num_hidden_layers * SUMS_A_LAYER[name]}


@pytest.fixture(scope="module", params=(1, 2, 4), ids=lambda n: f"tp{n}")
def found(request):
    """((checkpoint, mode) -> the reports of all ranks, checkpoint -> completed values), from one set of processes."""
    # One rank has nothing to sum, whatever the mode.
    cases = [case for case in CASES if request.param > 1 or case[1] == "both paths" or case[0] in VARIANTS]
    runs = [(run_model, *case) for case in cases]
    checks = [(completed_values, name) for name in ("glm4_moe_b", "nemotron_h_a") if request.param == 2]
    if request.param == 4:
        one = {"fused": True, "ways": ["packed"]}
        checks = [(run_cases_of, layout, [{**one, "checkpoint": name}]) for name, layout in LAYOUTS.items()]
    results = run_cases(request.param, [*runs, *checks], timeout_s=175)
    return request.param, dict(zip(cases, results, strict=False)), results[len(runs) :]


@pytest.fixture(scope="module")
def reports(found):
    return found[:2]


def test_logits_are_the_references(reports):
    _, by_case = reports
    for case, ranks in by_case.items():
        for rank, report in enumerate(ranks):
            assert max(report["errors"].values()) < TOLERANCE, (case, rank, report["errors"])


def test_greedy_tokens_are_the_references(reports):
    _, by_case = reports
    for case, ranks in by_case.items():
        for rank, report in enumerate(ranks):
            assert report["greedy"] and all(report["greedy"].values()), (case, rank, report["greedy"])


def test_every_sum_is_reduced_once_and_all_go_with_a_norm(reports):
    """2L sums of an L-layer decoder, L of a hybrid one; the embedding's own is the only other reduction."""
    num_ranks, by_case = reports
    for (name, mode), ranks in by_case.items():
        for report in ranks:
            counts = {"add_rms_norm": 0, "all_reduce": 0}
            for op, _, _, count in report["counters"]:
                counts[op] += count
            sums = report["num_layers"] * (SUMS_A_LAYER | VARIANTS)[name]
            expected = {"add_rms_norm": sums, "all_reduce": 1} if mode != "unfused" else {"all_reduce": 1 + sums}
            each = {op: expected.get(op, 0) * report["forwards"] for op in counts}
            assert counts == (each if num_ranks > 1 else {"add_rms_norm": 0, "all_reduce": 0}), (name, mode, counts)


def test_the_paths_taken_are_the_modes(reports):
    num_ranks, by_case = reports
    expected = {"fused": {"fused"}, "both paths": {"fused", "plain"}, "unfused": {"plain"}}
    for (name, mode), ranks in by_case.items():
        for report in ranks:
            paths = {path for _, path, _, _ in report["counters"]}
            assert paths == (expected[mode] if num_ranks > 1 else set()), (name, mode, report["counters"])


def test_the_next_stage_and_other_layouts_see_completed_values(found):
    """GLM4-MoE under every layout is in test_layouts.py; here, latent keys cross ranks and a hybrid's stream stages."""
    num_ranks, _, checks = found
    for ranks in checks if num_ranks == 4 else ():
        for (report,) in ranks:
            assert report["errors"]["packed"] < TOLERANCE and report["tokens"] == {"packed": True}, report


def test_draft_models_and_early_exits_see_completed_values_at_no_extra_reduction(found):
    for ranks in found[2] if found[0] == 2 else ():
        for report in ranks:
            assert report["error"] < 1e-5
            assert report["sums"] == [report["expected"], report["expected"]]
