#!/usr/bin/env python3
"""Record what FlashInfer's real packages offer, for the tests: signatures, and the order of the compiled call.

    python tools/record_flashinfer_api.py tests/data/flashinfer_api.json

Installs each package into a temporary folder (some 100 MB each, from the package index), imports it through Paddle's
torch proxy as the backend does, without a GPU, and writes one JSON file. Run it again when a version is added.
"""

from __future__ import annotations

import ctypes
import inspect
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

PACKAGES = (
    "flashinfer-python-paddle==0.4.1.1",
    "flashinfer-python==0.6.6",
    "flashinfer-python==0.6.12",
    "flashinfer-python==0.6.18",
    "flashinfer-python==0.7.4",
)
# What importing FlashInfer takes besides itself; its own requirements would bring torch.
HELPERS = (
    "apache-tvm-ffi==0.1.15.post2", "requests", "urllib3", "idna", "certifi", "charset_normalizer", "packaging",
    "filelock", "jinja2", "markupsafe", "nvidia-ml-py", "cuda-bindings>=13,<14", "cuda-pathfinder",
    "nvidia-cuda-runtime==13.0.96", "triton", "cuda-tile", "typing_extensions",
)  # fmt: skip
NAMES = (
    "create_allreduce_fusion_workspace",
    "allreduce_fusion",
    "trtllm_create_ipc_workspace_for_all_reduce_fusion",
    "trtllm_destroy_ipc_workspace_for_all_reduce_fusion",
    "trtllm_allreduce_fusion",
)


def install(folder: Path, *packages: str) -> None:
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(folder), *packages]
    subprocess.run(command, check=True)


def signature(function: Any) -> list[list[Any]]:
    """[name, kind, has a default] of each parameter."""
    found = inspect.signature(inspect.unwrap(function)).parameters.values()
    return [[p.name, p.kind.name, p.default is not p.empty] for p in found]


def record() -> dict[str, Any]:
    """Of the FlashInfer on sys.path, imported the backend's way."""
    from fastdeploy_fusion.backends.flashinfer import api, bound, detect

    for path in sys.path:
        for library in Path(path).glob("nvidia/**/libcudart.so*"):
            ctypes.CDLL(str(library))  # older versions look for it among the loaded libraries
    known = api.recognize
    api.recognize = lambda comm, version: version  # imports are recorded of refused versions too
    comm = detect._attempt("proxy").comm
    inner = comm.trtllm_ar
    compiled = SimpleNamespace(trtllm_allreduce_fusion=None)
    inner.gen_trtllm_comm_module = lambda: SimpleNamespace(build_and_load=lambda: compiled)
    create = inspect.unwrap(comm.trtllm_create_ipc_workspace_for_all_reduce_fusion)
    try:
        kind = known(comm, "0.0").kind
    except api.UnknownApi:
        kind = "unknown"
    return {
        "api": kind,
        "order": bound.bind(inner).order,
        "signatures": {name: signature(getattr(comm, name)) for name in NAMES if hasattr(comm, name)},
        "create_refers_to": sorted(set(create.__code__.co_names)),
    }


def main(out: str) -> None:
    root = Path(__file__).resolve().parents[1]
    found = {}
    with tempfile.TemporaryDirectory(prefix="flashinfer-api-") as name:
        helpers = Path(name) / "helpers"
        install(helpers, *HELPERS)
        for package in PACKAGES:
            folder = Path(name) / package
            install(folder, package)
            code = "import record_flashinfer_api as r, json; print('\\n' + json.dumps(r.record()))"
            path = [str(root), str(root / "tools"), str(folder), str(helpers)]
            script = f"import sys; sys.path[:0] = {path!r}; {code}"
            run = subprocess.run([sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True)
            if run.returncode:
                raise SystemExit(f"{package}:\n{run.stderr[-3000:]}")
            found[package] = json.loads(run.stdout.strip().splitlines()[-1])
            print(package, found[package]["api"], flush=True)
    lines = [f"{json.dumps(package)}: {json.dumps(recorded, sort_keys=True)}" for package, recorded in found.items()]
    Path(out).write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(sys.argv[1])
