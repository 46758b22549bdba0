"""Finding FlashInfer: by torch or by Paddle's proxy, tried once, leaving nothing behind where it fails.

Each case runs in a fresh interpreter against a small package called flashinfer (and, for one way, torch).
"""

import json
import subprocess
import sys
import textwrap

import pytest

GOOD = {
    "flashinfer/__init__.py": "__version__ = '0.6.99'\nimport torch\n",
    "flashinfer/comm/__init__.py": """
        from .trtllm_ar import *
        def create_allreduce_fusion_workspace(backend, world_size, rank, max_token_num, hidden_dim, dtype,
                                              gpus_per_node=None, comm_backend=None, group=None): pass
        def allreduce_fusion(input, workspace, pattern, launch_with_pdl=False, output=None, residual_out=None,
                             norm_out=None, residual_in=None, rms_gamma=None, rms_eps=1e-6, use_oneshot=None,
                             fp32_acc=False): pass
    """,
    "flashinfer/comm/trtllm_ar.py": """
        import torch
        import torch.distributed as dist
        from torch.distributed import ProcessGroup
        def trtllm_create_ipc_workspace_for_all_reduce_fusion():
            return SymmDeviceMemory(torch.cuda.current_device())
        def trtllm_destroy_ipc_workspace_for_all_reduce_fusion(workspace): pass
        def trtllm_allreduce_fusion(weight_bias=None): pass
        def late_import():
            import torch
            return torch
    """,
}
BROKEN = GOOD | {"flashinfer/comm/trtllm_ar.py": "import torch\nimport torch.distributed\nfrom . import not_there\n"}
UNKNOWN = GOOD | {"flashinfer/comm/__init__.py": "from . import trtllm_ar\n"}
TORCH = {
    "torch/__init__.py": "__version__ = '2.99'\n",
    "torch/distributed.py": "class ProcessGroup: pass\n",
}
SCRIPT = """
import json, sys, warnings
warnings.simplefilter("ignore")
import paddle
before = set(sys.modules), list(sys.meta_path)
from fastdeploy_fusion.backends.flashinfer import detect
assert not [n for n in sys.modules if n.startswith("flashinfer")]
way, reason = detect.find_way()
same = detect.find_way() == (way, reason)
late = way.comm.trtllm_ar.late_import().__name__ if way else None
if way and way.proxy: way.proxy.tidy()
try:
    import torch
    outside = [torch.__version__, type(torch).__name__]
except ModuleNotFoundError:
    outside = None
new = sorted(n for n in set(sys.modules) - before[0] if n.split(".")[0] in ("flashinfer", "torch", "paddle"))
finder = [f for f in sys.meta_path if f not in before[1]]
print(json.dumps({"kind": way and way.kind, "version": way and way.version, "api": way and way.api.kind,
    "reason": reason, "same": same, "late": late, "outside": outside, "new": new, "finders": len(finder),
    "overrides": [n for n in __import__("paddle").compat.proxy.GLOBAL_OVERRIDES if "ProcessGroup" in n],
    "attributes": [n for n in ("torch_version",) if hasattr(paddle, n)]}))
"""


def detect(tmp_path, *packages):
    for package in packages:
        for name, text in package.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(textwrap.dedent(text))
    script = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{SCRIPT}"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.strip().splitlines()[-1])


@pytest.fixture(autouse=True)
def bare_machine():
    for name in ("flashinfer", "torch"):
        if __import__("importlib.util").util.find_spec(name) is not None:
            pytest.skip(f"{name} is installed, and these tests bring their own")
    if not hasattr(__import__("paddle").compat, "proxy"):
        pytest.skip("this Paddle has no torch proxy")


def test_by_the_proxy(tmp_path):
    found = detect(tmp_path, GOOD)
    assert (found["kind"], found["version"], found["api"]) == ("proxy", "0.6.99", "unified")
    assert found["same"]
    assert found["late"] == "torch"
    assert found["outside"] is None, "torch can be imported outside FlashInfer, and there is none"


def test_by_torch(tmp_path):
    found = detect(tmp_path, GOOD, TORCH)
    assert (found["kind"], found["finders"]) == ("torch", 0)
    assert found["outside"] == ["2.99", "module"]


def test_the_proxy_is_tried_where_torch_s_way_fails(tmp_path):
    broken_torch = TORCH | {"torch/distributed.py": "raise OSError('libcudart.so.13 is missing')\n"}
    found = detect(tmp_path, GOOD, broken_torch)
    assert found["kind"] == "proxy"
    assert found["outside"] == ["2.99", "module"], "the real torch must stay what `import torch` gives elsewhere"


@pytest.mark.parametrize(
    ("package", "words"),
    [(BROKEN, "cannot import name 'not_there'"), (UNKNOWN, "FlashInfer 0.6.99 with Paddle")],
)
def test_a_failed_attempt_leaves_nothing(tmp_path, package, words):
    found = detect(tmp_path, package)
    assert found["kind"] is None
    assert words in found["reason"]
    assert "torch: ModuleNotFoundError: No module named 'torch'" in found["reason"]
    assert found["same"]
    assert found["outside"] is None
    assert (found["new"], found["finders"], found["overrides"], found["attributes"]) == ([], 0, [], [])


def test_nothing_installed(tmp_path):
    found = detect(tmp_path)
    assert "proxy: ModuleNotFoundError: No module named 'flashinfer'" in found["reason"]
    assert (found["new"], found["finders"]) == ([], 0)
