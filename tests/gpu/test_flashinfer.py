"""The correctness matrix on real GPUs: each section of tools/verify_gpu.py on two ranks."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SECTIONS = ("matrix", "chain", "special", "stream", "graph", "pair", "memory", "refuse", "soak")


def gpus():
    listing = subprocess.run(["nvidia-smi", "-L"], text=True, capture_output=True, timeout=60, check=False).stdout
    return listing.count("GPU ")


@pytest.mark.parametrize("section", SECTIONS)
def test_section(section):
    if gpus() < 2:
        pytest.skip("fewer than two GPUs")
    if importlib.util.find_spec("flashinfer") is None:
        pytest.skip("FlashInfer is not installed")
    if importlib.util.find_spec("torch") is not None:
        launcher = ["-m", "torch.distributed.run", "--nproc_per_node", "2"]
    else:
        launcher = ["-m", "paddle.distributed.launch", "--gpus", "0,1"]
    command = [sys.executable, *launcher, str(ROOT / "tools" / "verify_gpu.py"), "--sections", section]
    run = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, timeout=320, check=False)
    assert "\nPASS" in run.stdout, run.stdout[-3000:] + run.stderr[-3000:]
