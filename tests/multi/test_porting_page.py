"""The script of docs/porting.md runs as it stands, on one rank and on two."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from fastdeploy_fusion.launch import free_endpoints, rank_environment

ROOT = Path(__file__).parents[2]


CODE = re.findall(r"```python\n(.*?)```", (ROOT / "docs/porting.md").read_text(), re.DOTALL)


def run(code, num_ranks, *argv):
    endpoints = free_endpoints(num_ranks)
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", code, *argv],
            cwd=ROOT,
            env=rank_environment(rank, endpoints),
            text=True,
            stdout=subprocess.PIPE,
        )
        for rank in range(num_ranks)
    ]
    outs = [rank.communicate(timeout=100)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * num_ranks
    return outs


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_the_script_runs(num_ranks):
    path, reason = ("fused", "fits the fused workspace") if num_ranks > 1 else ("plain", "one rank")
    for rank, out in enumerate(run(CODE[0], num_ranks)):
        assert f"{path}: {reason}" in out
        ranks_label = ",".join(map(str, range(num_ranks)))
        assert (
            f'fdfusion_sums_total{{rank="{rank}",ranks="{ranks_label}",site="model.layers.0.self_attn.o_proj",'
            f'op="add_rms_norm",path="{path}",reason="{reason}"}} 1' in out
        )


def test_the_flags_run():
    assert "off (fusion is off)" in run(CODE[1], 1)[0]
    flags = ("--tensor-parallel-size=2", "--enable-flashinfer-allreduce-fusion")
    for out in run(CODE[1], 2, *flags):
        assert out.startswith("on (fits the fused workspace (shm)); decided by --enable-flashinfer-allreduce-fusion")


def test_fastdeploys_model_is_wired():
    for out in run(CODE[2], 2):
        assert "layers.1.self_attn.o_proj -> model.layers.1.post_attention_layernorm" in out
        assert "reduces itself: " in out and "[3, " in out
