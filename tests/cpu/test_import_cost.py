"""Importing and asking for help load nothing heavy. What it costs in time is shown by tools/bench_import.py."""

import subprocess
import sys

import pytest

from fastdeploy_fusion.cli.main import COMMANDS

HEAVY = ("paddle", "numpy", "torch", "flashinfer", "tvm_ffi", "tokenizers", "safetensors", "matplotlib", "ml_dtypes")


def loaded_after(code):
    code += f"\nimport sys\nprint([m for m in {HEAVY!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], text=True, capture_output=True, check=True)
    return done.stdout.splitlines()[-1]


def test_the_package():
    assert loaded_after("import fastdeploy_fusion") == "[]"


def test_names_that_engines_need_before_they_start():
    code = (
        "from fastdeploy_fusion import FusionConfig, ParallelConfig, add_fusion_args, add_parallel_args, fusable\n"
        "from fastdeploy_fusion.metrics import prometheus_text\n"
        "from fastdeploy_fusion import policy, topology, remedies, hardware"
    )
    assert loaded_after(code) == "[]"


@pytest.mark.parametrize("command", ["", *(module.NAME for module in COMMANDS)])
def test_help(command):
    code = f"""
from fastdeploy_fusion.cli import main
try:
    main({[command, "--help"] if command else ["--help"]!r})
except SystemExit as leaving:
    assert leaving.code == 0"""
    assert loaded_after(code) == "[]"
