#!/usr/bin/env python3
"""What importing costs: `import fastdeploy_fusion` (target: under 50 ms) and `--help` of each command (under 0.3 s).

    python tools/bench_import.py [--repeats 15]

Each figure is a fresh interpreter's, caches warm; an import's is less that of an interpreter that imports nothing, run
just before it. The least of all repeats is what counts: a busy machine only adds to it.
"""

import argparse
import statistics
import subprocess
import sys
import time

HEAVY = ("paddle", "numpy", "torch", "flashinfer", "tvm_ffi", "tokenizers", "safetensors")
IMPORT_TARGET_S, HELP_TARGET_S = 0.05, 0.3


def seconds(argv: list[str]) -> float:
    """Wall seconds of one run."""
    begin = time.perf_counter()
    subprocess.run(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True)
    return time.perf_counter() - begin


def repeated(argv: list[str], repeats: int) -> list[float]:
    """After one run that warms the caches."""
    return [seconds(argv) for _ in range(repeats + 1)][1:]


def show(name: str, took: list[float], least: float, target: float) -> bool:
    verdict = "ok" if least < target else "TOO SLOW"
    median = statistics.median(took)
    print(f"{name:<32} {1e3 * least:6.1f} ms (median {1e3 * median:.1f}), target {1e3 * target:.0f} ms: {verdict}")
    return least < target


def heavy_modules(code: str) -> list[str]:
    """Which of HEAVY are loaded after `code`."""
    code += f"; import sys; print(*[m for m in {HEAVY!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], text=True, capture_output=True, check=True)
    return done.stdout.split()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=15)
    repeats = parser.parse_args().repeats
    from fastdeploy_fusion.cli.main import COMMANDS

    bare, package = [], []
    for _ in range(repeats + 1):
        bare.append(seconds([sys.executable, "-c", "pass"]))
        package.append(seconds([sys.executable, "-c", "import fastdeploy_fusion"]))
    added = [with_it - without for with_it, without in zip(package[1:], bare[1:], strict=True)]
    fine = [show("import fastdeploy_fusion", added, min(package[1:]) - min(bare[1:]), IMPORT_TARGET_S)]
    for name in ["", *(module.NAME for module in COMMANDS)]:
        argv = [sys.executable, "-m", "fastdeploy_fusion", *([name] if name else []), "--help"]
        took = repeated(argv, repeats)
        fine.append(show(f"{name} --help".strip(), took, min(took), HELP_TARGET_S))
    loaded = heavy_modules("import fastdeploy_fusion, fastdeploy_fusion.cli")
    print(f"heavy modules that they load: {', '.join(loaded) or 'none'}")
    return 0 if all(fine) and not loaded else 1


if __name__ == "__main__":
    sys.exit(main())
