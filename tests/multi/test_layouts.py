"""Every layout on real ranks: sums over exactly the right ones, and GLM4-MoE's logits and tokens as on one."""

import json
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from fastdeploy_fusion import ParallelConfig
from fastdeploy_fusion.topology import make_topology
from tests.multi import layout_bodies as bodies
from tests.ranks import run_cases

pytestmark = pytest.mark.timeout(400)  # several minutes' worth of cases in one set of processes where cores are shared
TIMEOUT_S = 360
TOLERANCE = 2e-4
SHORT = {"TP": "tensor", "EP": "expert", "CP": "context", "PP": "pipeline", "DP": "data"}
BOTH_WAYS = ["packed", "one by one"]
CASES = [
    {"checkpoint": "glm4_moe_a", "fused": True, "ways": BOTH_WAYS},
    {"checkpoint": "glm4_moe_a", "fused": False, "ways": BOTH_WAYS},
    {"checkpoint": "glm4_moe_b", "fused": True, "ways": ["packed"]},
]
ONE_CASE = [{"checkpoint": "glm4_moe_a", "fused": True, "ways": ["packed"]}]
# TP4 itself is in test_glm4_moe.py.
MODEL_LAYOUTS = ("TP4 EP4", "TP4 EP2", "CP2 TP2", "DP2 TP2", "PP2 TP2")
OTHER_LAYOUTS = {
    2: ("TP2 EP2", "CP2", "PP2", "DP2"),
    3: ("TP3", "CP3", "PP3"),
    6: ("CP3 TP2", "DP3 PP2"),
    8: ("CP2 PP2 TP2", "DP2 TP4 EP2"),
}

DIGITS_ONLY = ("TP3", "DP2", "DP3 PP2", "DP2 TP4 EP2")  # 8 heads don't split by 3; the others would add nothing


def sizes_of(layout):
    """``"CP2 TP2"`` -> the settings of ``ParallelConfig``."""
    return {f"{SHORT[word[:2]]}_parallel_size": int(word[2:]) for word in layout.split()}


@pytest.fixture(scope="module")
def on_four_ranks():
    """(layout -> digits of all ranks, layout -> reports of all ranks), from one set of processes."""
    digits = [(bodies.digits, sizes_of(layout)) for layout in ("TP4", *MODEL_LAYOUTS)]
    runs = [(bodies.run_cases_of, sizes_of(layout), CASES) for layout in MODEL_LAYOUTS]
    found = run_cases(4, [*digits, *runs], timeout_s=TIMEOUT_S)
    return dict(zip(("TP4", *MODEL_LAYOUTS), found, strict=False)), dict(
        zip(MODEL_LAYOUTS, found[len(digits) :], strict=True)
    )


def check_digits(layout, per_rank):
    """Each sum's digits name the members of the rank's group, once each, whichever way it was summed."""
    topology = make_topology(ParallelConfig(**sizes_of(layout)))
    names = {"tp": "attention_tp", "moe": "moe", "context": "context", "pipeline": "pipeline", "replica": "replica"}
    for rank, sums in enumerate(per_rank):
        assert set(sums) == set(names)
        for name, group in names.items():
            expected = float(sum(10**member for member in topology.group_of(group, rank)))
            assert set(sums[name]) == {expected}, (layout, rank, name, sums[name])


def check_run(layout, case, ranks):
    sizes = ParallelConfig(**sizes_of(layout))
    for rank, report in enumerate(ranks):
        where = (layout, case, rank, report)
        assert set(report["errors"]) == set(case["ways"]) and max(report["errors"].values()) < TOLERANCE, where
        assert all(report["tokens"].values()), where
        check_sums(sizes, case, report, where)
    for rank in range(len(ranks)):
        # What the ranks of a replica do is counted alike; a stage has its own sums.
        assert ranks[rank]["forwards"] > 0


def check_sums(sizes, case, report, where):
    """One reduction a sum: two a layer, and the embedding's on the first stage. The fused ones go with a norm, all but
    the last one of a stage before the last, which is completed at the boundary."""
    last_stage = sizes.pipeline_parallel_size - 1
    is_first, is_last = report["stage"] == 0, report["stage"] == last_stage
    crossing, summed = not is_last, sizes.tensor_parallel_size > 1
    owed = {"all_reduce": 0, "add_rms_norm": 0}
    if summed and case["fused"]:
        owed = {"all_reduce": is_first + crossing, "add_rms_norm": 2 * report["layers"] - crossing}
    elif summed:
        owed = {"all_reduce": is_first + 2 * report["layers"], "add_rms_norm": 0}
    counted = {"all_reduce": 0, "add_rms_norm": 0}
    for op, path, _, count in report["counters"]:
        counted[op] += count
        assert path == ("fused" if case["fused"] and summed else "plain"), where
    assert counted == {op: count * report["forwards"] for op, count in owed.items()}, where
    assert report["transfers"] == (report["forwards"] if crossing else 0), where
    assert report["gathers"] == num_gathers(sizes.context_parallel_size, case["ways"], report) * (
        report["layers"] + is_last
    ), where


def num_gathers(num_parts, ways, report):
    """Forwards that are cut over context ranks: prompts of a token a rank at least, once for logits, once to go on."""
    long_enough = [length >= num_parts for length in report["prompt_lengths"]]
    forwards = 2 * any(long_enough) * ("packed" in ways) + 2 * sum(long_enough) * ("one by one" in ways)
    return forwards if num_parts > 1 else 0


@pytest.mark.parametrize("layout", ["TP4", *MODEL_LAYOUTS])
def test_digits_name_the_members_of_every_group(on_four_ranks, layout):
    check_digits(layout, on_four_ranks[0][layout])


@pytest.mark.parametrize("layout", MODEL_LAYOUTS)
def test_glm4_moe_gives_the_references_logits_and_tokens(on_four_ranks, layout):
    per_rank = on_four_ranks[1][layout]
    for index, case in enumerate(CASES):
        check_run(layout, case, [reports[index] for reports in per_rank])


def test_a_stage_reads_only_its_own_layers(on_four_ranks):
    pipelined, replicated = ([ranks[0]["bytes"] for ranks in on_four_ranks[1][name]] for name in MODEL_LAYOUTS[:2:-1])
    assert all(own < 0.6 * whole for own, whole in zip(pipelined, replicated, strict=True))
    assert sum(pipelined[::2]) == replicated[0]


@pytest.mark.parametrize("num_ranks", OTHER_LAYOUTS)
def test_digits_and_the_model_on_other_numbers_of_ranks(num_ranks):
    layouts = OTHER_LAYOUTS[num_ranks]
    runs = [layout for layout in layouts if layout not in DIGITS_ONLY]
    cases = [(bodies.digits, sizes_of(layout)) for layout in layouts]
    cases += [(bodies.run_cases_of, sizes_of(layout), ONE_CASE) for layout in runs]
    found = run_cases(num_ranks, cases, timeout_s=TIMEOUT_S)
    for layout, per_rank in zip(layouts, found, strict=False):
        check_digits(layout, per_rank)
    for layout, per_rank in zip(runs, found[len(layouts) :], strict=True):
        check_run(layout, ONE_CASE[0], [reports[0] for reports in per_rank])


def test_every_rank_is_told_what_any_stage_misses(data, tmp_path):
    folder = tmp_path / "broken"
    shutil.copytree(data / "glm4_moe_b", folder)
    file = folder / "model.safetensors"
    file.chmod(0o644)
    tensors = load_file(file)
    del tensors["model.layers.0.mlp.up_proj.weight"], tensors["model.layers.2.mlp.experts.5.up_proj.weight"]
    tensors["model.visual.weight"] = np.zeros(3, np.float32)
    save_file(tensors, file)
    layouts = ("PP2", "TP2 EP2")
    for texts in run_cases(2, [(bodies.load_broken, sizes_of(layout), str(folder)) for layout in layouts]):
        for text in texts:
            assert "2 missing" in text and "1 unexpected" in text and "model.visual.weight" in text, text
            assert "model.layers.0.mlp.up_proj.weight" in text
            assert "model.layers.2.mlp.experts.5.up_proj.weight" in text
    assert json.loads((folder / "config.json").read_text())["num_hidden_layers"] == 3
