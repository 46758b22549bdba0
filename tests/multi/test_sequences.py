"""200 random layouts with random calls on their groups: nothing differs from the reference by more than rounding."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.multi.sequence_bodies import random_sequences
from tests.ranks import run_ranks

NUM_CASES = 100  # a seed


@pytest.mark.parametrize("seed", [4, 5])
def test_random_layouts_and_calls_equal_the_reference(seed):
    for result in run_ranks(4, random_sequences, seed, NUM_CASES, timeout_s=175):
        assert result["differences"] == []
        counters = result["counters"]
        assert (
            min(counters[f"{op} {path}"] for op in ("add_rms_norm", "all_reduce") for path in ("fused", "plain")) > 20
        )
        assert result["groups"] == 5  # [0,1] [2,3] [0,2] [1,3], and all four


def test_the_soak_runs_and_passes():
    tool = Path(__file__).resolve().parents[2] / "tools/soak_shm.py"
    argv = [sys.executable, tool, "--calls", "3000", "--timeout", "60"]
    done = subprocess.run(argv, text=True, capture_output=True, timeout=90)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "PASS"), done.stdout + done.stderr
