"""What a machine offers to fuse with: facts for people, and each backend tried as ``open`` would.

No rules of its own: with several ranks a backend is opened and closed again, self-test included, and the reason is what
``AllReduceFusion`` would have; one rank alone asks the backend's ``probe`` and ``refuse``.
"""

import dataclasses
import os
import platform
import time
from typing import Any

import paddle

from . import env, probe, remedies
from .backends import MODULES, WorkspacePlan, module_of, resolve
from .backends.flashinfer import parts
from .config import FusionConfig
from .fusion import AllReduceFusion
from .groups import RankGroup
from .policy import Decision, GroupState, Op, Path, Reason, Request, decide

FUSED = tuple(name for name in MODULES if name != "plain")


def diagnose(group: RankGroup, hidden_size: int, dtype: str | None = None) -> dict[str, Any]:
    """Facts of all ranks and the verdict on each backend, JSON-able. Collective; the same on all ranks.

    ``dtype`` None: bfloat16 on GPUs, float32 on CPUs.
    """
    device = probe.device()
    dtype = dtype or ("float32" if device == "cpu" else "bfloat16")
    plan = WorkspacePlan(max(2, group.size), hidden_size, dtype, 1)
    own = {"machine": machine(), "probes": {name: _probe(name, plan) for name in FUSED}}
    ranks = group.all_gather_object(own, "doctor")
    verdicts = [_verdict(name, group, plan, [rank["probes"][name] for rank in ranks]) for name in FUSED]
    auto = resolve("auto", device)
    return {
        "num_ranks": group.size,
        "ranks": [rank["machine"] for rank in ranks],
        "num_hosts": len({rank["probes"]["shm"].get("host") for rank in ranks}),
        "peer_access": _peer_access([rank["probes"]["trtllm"] for rank in ranks]),
        "hidden_size": hidden_size,
        "dtype": dtype,
        "auto": auto,
        "backends": verdicts,
        "usable": any(verdict["usable"] for verdict in verdicts),
    }


def machine() -> dict[str, Any]:
    """Facts of this rank's process and machine, for people. Never raises."""
    device = probe.device()
    with_cuda = paddle.is_compiled_with_cuda()
    return {
        "pid": os.getpid(),
        "host": platform.node(),
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cores": len(os.sched_getaffinity(0)),
        "memory": _memory(),
        "shared_memory": _shared_memory(),
        "device": device,
        "paddle": paddle.__version__,
        "paddle_cuda": str(paddle.version.cuda()) if with_cuda else None,
        "num_gpus": paddle.device.cuda.device_count() if with_cuda else 0,
        "gpu": parts.gpu(device),
        "driver": _first_line("/proc/driver/nvidia/version"),
        "versions": parts.versions(),
        "flashinfer_cache": parts.cache_path(),
        "flashinfer_cache_exists": os.path.isdir(parts.cache_path()),
        "environment": _environment(),
    }


def _probe(name: str, plan: WorkspacePlan) -> dict[str, Any]:
    return probe.rank_facts(name, FusionConfig(enabled=True, backend=name), plan)


def _verdict(name: str, group: RankGroup, plan: WorkspacePlan, facts: list[dict[str, Any]]) -> dict[str, Any]:
    """Whether a backend can be used, else the one reason and the way out."""
    verdict: dict[str, Any] = {"name": name, "tried": False, "limit": None, "workspace_bytes": None, "seconds": None}
    config = FusionConfig(enabled=True, backend=name)
    if group.size == 1:
        state = GroupState(2, module_of(name).refuse(facts, plan), name, plan.hidden_size, 1)
    else:
        begin = time.monotonic()
        with AllReduceFusion.open(config, group=group, hidden_size=plan.hidden_size, dtype=plan.dtype) as fusion:
            state = fusion.state
    decision = decide(Request(Op.ADD_RMS_NORM, (1, plan.hidden_size), plan.dtype, plan.dtype), state, config)
    if decision.path is Path.FUSED and group.size > 1:
        plan = dataclasses.replace(plan, num_max_tokens=state.num_max_tokens)
        verdict |= {
            "tried": True,
            "limit": state.num_max_tokens,
            "workspace_bytes": module_of(name).workspace_bytes(plan),
            "seconds": round(time.monotonic() - begin, 3),
        }
    return verdict | _reason(name, decision)


def _reason(name: str, decision: Decision) -> dict[str, Any]:
    """Whether that is the fused path; if not, why in words, what it means, and what to do."""
    if decision.path is Path.FUSED:
        return {"usable": True, "reason": None, "meaning": None, "action": None}
    if decision.reason is not Reason.UNAVAILABLE:  # the policy's own rules, as on rows of an odd length
        meaning, action = remedies.DECISIONS[decision.reason]
        return {"usable": False, "reason": str(decision).partition(": ")[2], "meaning": meaning, "action": action}
    remedy = remedies.find(decision.detail)
    return {
        "usable": False,
        "reason": decision.detail.removeprefix(f"{name}: "),
        "meaning": remedy.meaning if remedy else None,
        "action": remedy.action if remedy else None,
    }


def _peer_access(facts: list[dict[str, Any]]) -> list[list[bool]] | None:
    """``[rank][other]``: whether the rank's GPU can map memory of the other's; None without GPUs."""
    if any("uuid" not in fact for fact in facts):
        return None
    return [[peer is fact or peer["uuid"] in fact["peers"] for peer in facts] for fact in facts]


def _memory() -> dict[str, int]:
    """Bytes: total, and what the kernel could give without swapping."""
    found = {}
    for line in _lines("/proc/meminfo"):
        name, _, rest = line.partition(":")
        if name in ("MemTotal", "MemAvailable"):
            found["total" if name == "MemTotal" else "available"] = int(rest.split()[0]) << 10
    return found


def _shared_memory() -> dict[str, int]:
    """Bytes of /dev/shm. The ``shm`` backend does not use that mount, Paddle's own data loaders and NCCL do."""
    try:
        mount = os.statvfs("/dev/shm")
    except OSError:
        return {}
    return {"total": mount.f_blocks * mount.f_frsize, "free": mount.f_bavail * mount.f_frsize}


def _environment() -> dict[str, str]:
    """Variables that change what is fused, where they are set."""
    found = {v.name: env.text(v.name) for v in env.VARIABLES if env.text(v.name) != v.default}
    for name in ("CUDA_VISIBLE_DEVICES", "FLAGS_selected_gpus", "FLASHINFER_WORKSPACE_BASE"):
        if name in os.environ:
            found[name] = os.environ[name]
    return found


def _first_line(path: str) -> str | None:
    return next(iter(_lines(path)), None)


def _lines(path: str) -> list[str]:
    try:
        with open(path) as file:
            return file.read().splitlines()
    except OSError:
        return []
