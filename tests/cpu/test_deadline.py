"""No test can hang: every test has an outer deadline, and it strikes. (Ranks have one of their own: test_ranks.py.)"""

import subprocess
import sys
import time
from pathlib import Path

SETTINGS = Path(__file__).resolve().parents[2] / ".pytest.ini"
HANGS = "import time\n\n\ndef test_hangs():\n    time.sleep(60)\n"


def test_every_test_has_a_deadline(request):
    assert 0 < float(request.config.getini("timeout")) <= 180


def test_the_deadline_ends_a_test_that_hangs(tmp_path):
    tmp_path.joinpath("test_it.py").write_text(HANGS)
    argv = [sys.executable, "-m", "pytest", "-c", SETTINGS, "-o", "timeout=1", "-p", "no:cacheprovider", tmp_path]
    begin = time.monotonic()
    done = subprocess.run(list(map(str, argv)), text=True, capture_output=True, timeout=30)
    assert done.returncode == 1 and "Timeout" in done.stdout and "time.sleep(60)" in done.stdout, done.stdout
    assert time.monotonic() - begin < 20
