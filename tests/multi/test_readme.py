"""README's script runs as it stands."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_ten_line_script_runs_fused_on_two_ranks(tmp_path):
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert len([line for line in code.splitlines() if line.strip()]) <= 10
    script = tmp_path / "script.py"
    script.write_text(code)
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "paddle.distributed.launch",
            "--nproc_per_node",
            "2",
            "--log_dir",
            str(tmp_path),
            script,
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    logs = [(tmp_path / f"workerlog.{rank}").read_text() for rank in (0, 1)]
    assert done.returncode == 0, logs
    for rank, log in enumerate(logs):
        assert f"{rank} True fused: fits the fused workspace (shm)" in log, log


def test_links_lead_somewhere():
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        for link in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            assert (page.parent / link).exists(), (page, link)
