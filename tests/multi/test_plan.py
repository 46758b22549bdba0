"""What `plan` says from config.json alone is what a run counts, site by site, on each path and for each reason."""

import json
import os
import subprocess
import sys
from collections import Counter

import pytest

from fastdeploy_fusion import probe, tuned
from fastdeploy_fusion.backends import WorkspacePlan
from fastdeploy_fusion.config import FusionConfig

NEW_TOKENS = 3
PROMPT = "Tensor parallel layers leave partial sums"


def command(name, *argv, env=None):
    argv = [sys.executable, "-m", "fastdeploy_fusion", name, *map(str, argv), "--json"]
    env = {**os.environ, **(env or {})}
    done = subprocess.run(argv, text=True, capture_output=True, timeout=100, check=False, env=env)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def compare(where, env=None):
    """Run and plan on the same flags; the sums of rank 0 must be those of the plan's first stage."""
    sampling = ("--prompt", PROMPT, "--max-new-tokens", NEW_TOKENS, "--ignore-eos")
    run = command("generate", *where, *sampling, env=env)
    prompt_tokens = run["stats"]["prompt_tokens"]
    plan = command("plan", *where, "--tokens", f"1,{prompt_tokens}", env=env)
    expected: Counter = Counter()
    for num_tokens in (prompt_tokens, *[1] * (NEW_TOKENS - 1)):
        for site in plan["sites"]:
            if site["stage"] == 0:
                decision = site["paths"][str(num_tokens)]
                expected[site["site"], site["op"], decision["path"], decision["reason"]] += 1
    counted = {(s["site"], s["op"], s["path"], s["reason"]): s["calls"] for s in run["stats"]["sites"]}
    assert counted == dict(expected)
    by_kind: Counter = Counter()
    for (_, *kind), calls in counted.items():
        by_kind[tuple(kind)] += calls
    assert by_kind == Counter({(s["op"], s["path"], s["reason"]): s["calls"] for s in run["stats"]["sums"]})
    return counted


@pytest.mark.parametrize(
    ("model", "flags"),
    [
        ("glm4_moe_a", ("--tensor-parallel-size", 2)),
        ("glm4_moe_a", ("--tensor-parallel-size", 2, "--flashinfer-allreduce-fusion-max-tokens", 2)),
        ("glm4_moe_b", ("--tensor-parallel-size", 2, "--flashinfer-allreduce-fusion-backend", "plain")),
        ("glm4_moe_b", ("--tensor-parallel-size", 2, "--expert-parallel-size", 2, "--pipeline-parallel-size", 2)),
        ("deepseek_v3_a", ("--tensor-parallel-size", 2)),
        ("qwen3_moe_a", ("--tensor-parallel-size", 4)),
        ("nemotron_h_a", ("--tensor-parallel-size", 2)),
        ("glm4_moe_a", ()),
    ],
)
def test_plan_and_run_agree(data, model, flags):
    where = ("--model", data / model, *flags, "--enable-flashinfer-allreduce-fusion")
    assert bool(compare(where)) == bool(flags)


def test_a_measured_table_moves_both(data, tmp_path):
    """Limits of 3 tokens with a norm and of none without, measured (so it says) on this machine."""
    table = tmp_path / "tuned.json"
    here = probe.rank_facts("shm", FusionConfig(enabled=True), WorkspacePlan(2, 64, "float32", 1))["tuned"]["here"]
    cases = (("add_rms_norm", 3), ("all_reduce", 0))
    shape = {"world_size": 2, "hidden_size": 64, "dtype": "float32", "crossed": True, "measured_to": 16384}
    tuned.write(table, [tuned.Entry(**here, **shape, pattern=pattern, limit=limit) for pattern, limit in cases])
    where = ("--model", data / "glm4_moe_a", "--tensor-parallel-size", 2, "--enable-flashinfer-allreduce-fusion")
    counted = compare(where, env={"FDFUSION_TUNED_TABLE": str(table)})
    assert {(op, path) for _, op, path, _ in counted} == {
        ("add_rms_norm", "fused"),
        ("add_rms_norm", "plain"),
        ("all_reduce", "plain"),
    }
