"""What all tests share: the folder a test lies in marks it; GPU tests are skipped, with the reason, without a GPU."""

import os
import shutil
import subprocess
from functools import lru_cache
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
KINDS = ("cpu", "multi", "gpu")


@lru_cache(maxsize=1)
def why_no_gpu() -> str | None:
    """None where an NVIDIA GPU answers; asks the driver's tool, so that collecting tests does not load Paddle."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return "no NVIDIA GPU: nvidia-smi is not installed"
    listing = subprocess.run([tool, "-L"], text=True, capture_output=True, timeout=60, check=False)
    return None if "GPU 0" in listing.stdout else f"no NVIDIA GPU: {(listing.stdout + listing.stderr).strip()[:200]}"


def pytest_configure() -> None:
    # Before any test imports Paddle; the processes that tests start inherit it.
    os.environ.setdefault("GLOG_minloglevel", "2")
    os.environ["FDFUSION_TUNED_TABLE"] = "off"  # a table of this machine's user would move the limits that tests expect
    os.environ.setdefault("PYTHONWARNINGS", "ignore:No ccache found")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        kind = item.path.relative_to(TESTS).parts[0]
        if kind in KINDS:
            item.add_marker(kind)
        if kind == "gpu" and (reason := why_no_gpu()):
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def data() -> Path:
    """The folder of small checkpoints."""
    return TESTS / "data"
