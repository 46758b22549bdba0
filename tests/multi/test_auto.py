"""What the fusion flags come to on two ranks: the state that is logged, once, is the one that the counters show."""

import argparse
import logging
from pathlib import Path

import pytest

from tests.ranks import run_cases

CHECKPOINT = Path(__file__).resolve().parents[1] / "data" / "qwen3_moe_a"
ENABLE, MODE = "--enable-flashinfer-allreduce-fusion", "--flashinfer-allreduce-fusion"
CASES = {
    "auto": ([MODE, "auto"], f"on (fits the fused workspace (shm)); decided by {MODE} auto: Qwen3MoeForCausalLM on 2"),
    "off beats on": ([ENABLE, MODE, "off"], "off (fusion is off); decided by " + MODE + " off"),
    "on beats auto": ([ENABLE, MODE, "auto"], "on (fits the fused workspace (shm)); decided by " + ENABLE),
    "neither": ([], "off (fusion is off); decided by the default"),
    "auto, but no backend is proven": (
        [MODE, "auto", MODE + "-backend", "trtllm"],
        "off (no fused backend for this group (trtllm: ",
    ),
}


def run_flags(rank, num_ranks, argv):
    from fastdeploy_fusion import models
    from fastdeploy_fusion.config import FusionConfig, ParallelConfig, add_fusion_args
    from fastdeploy_fusion.parallel import Parallel

    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("fastdeploy_fusion")
    logger.addHandler(handler)
    logger.setLevel("INFO")
    parser = argparse.ArgumentParser()
    add_fusion_args(parser)
    config, layout = models.load_config(CHECKPOINT), ParallelConfig(tensor_parallel_size=num_ranks)
    fusion = models.settle_fusion(FusionConfig.from_args(parser.parse_args(argv)), config, layout)
    with Parallel.open(layout, fusion, hidden_size=config.hidden_size) as parallel:
        model = models.load_model(CHECKPOINT, parallel, progress=False)
        models.generate(model, parallel, [[5, 6, 7]], models.SamplingParams(max_new_tokens=2))
        counters = [[*key, count] for key, count in parallel.counters.items()]
    logger.removeHandler(handler)
    return {"states": [line for line in lines if line.startswith("all-reduce fusion is")], "counters": counters}


@pytest.fixture(scope="module")
def reports():
    found = run_cases(2, [(run_flags, argv) for argv, _ in CASES.values()], timeout_s=90)
    return dict(zip(CASES, found, strict=True))


@pytest.mark.parametrize("case", CASES)
def test_the_logged_state_is_what_the_counters_show(reports, case):
    first, second = reports[case]
    assert len(first["states"]) == 1 and not second["states"]
    assert first["states"][0].startswith("all-reduce fusion is " + CASES[case][1]), first["states"]
    paths = {path for _, path, _, _ in first["counters"]}
    assert paths == {"fused" if CASES[case][1].startswith("on") else "plain"}
    assert first["counters"] == second["counters"]
