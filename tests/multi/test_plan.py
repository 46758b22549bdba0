"""What `plan` says from config.json alone is what a run counts, site by site, on each path and for each reason."""

import json
import subprocess
import sys
from collections import Counter

import pytest

NEW_TOKENS = 3
PROMPT = "Tensor parallel layers leave partial sums"


def command(name, *argv):
    argv = [sys.executable, "-m", "fastdeploy_fusion", name, *map(str, argv), "--json"]
    done = subprocess.run(argv, text=True, capture_output=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


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
    sampling = ("--prompt", PROMPT, "--max-new-tokens", NEW_TOKENS, "--ignore-eos")
    run = command("generate", *where, *sampling)
    prompt_tokens = run["stats"]["prompt_tokens"]
    plan = command("plan", *where, "--tokens", f"1,{prompt_tokens}")
    expected: Counter = Counter()
    for num_tokens in (prompt_tokens, *[1] * (NEW_TOKENS - 1)):
        for site in plan["sites"]:
            if site["stage"] == 0:  # generate reports rank 0's counters
                decision = site["paths"][str(num_tokens)]
                expected[site["site"], site["op"], decision["path"], decision["reason"]] += 1
    counted = {(s["site"], s["op"], s["path"], s["reason"]): s["calls"] for s in run["stats"]["sites"]}
    assert counted == dict(expected)
    assert bool(counted) == bool(flags)
    by_kind: Counter = Counter()
    for (_, *kind), calls in counted.items():
        by_kind[tuple(kind)] += calls
    assert by_kind == Counter({(s["op"], s["path"], s["reason"]): s["calls"] for s in run["stats"]["sums"]})
