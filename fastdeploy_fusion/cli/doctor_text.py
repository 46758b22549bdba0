"""A doctor's document (``diagnosis.diagnose``) as text for people."""

from collections.abc import Iterator
from typing import Any


def render(document: dict[str, Any]) -> str:
    """The whole text, ending in a newline."""
    return "\n".join([*_machine(document), "", *_backends(document), "", _verdict(document)]) + "\n"


def _machine(d: dict[str, Any]) -> Iterator[str]:
    first = d["ranks"][0]
    hosts = "one host" if d["num_hosts"] == 1 else f"{d['num_hosts']} hosts"
    yield _row("ranks", f"{d['num_ranks']} on {hosts}")
    for name, text in _facts(first).items():
        yield _row(name, text)
    for rank, facts in enumerate(d["ranks"]):
        differing = {n: t for n, t in _facts(facts).items() if t != _facts(first)[n] and n not in _OWN}
        for name, text in differing.items():
            yield _row(f"{name}, rank {rank}", text)
    if d["num_ranks"] > 1:
        yield _row("devices", ", ".join(facts["device"] for facts in d["ranks"]))
        yield from _peers(d["peer_access"])


_OWN = ("memory", "/dev/shm", "device")
"""Facts that change from moment to moment, or that differ between ranks as they should."""


def _facts(facts: dict[str, Any]) -> dict[str, str]:
    memory, shared = facts["memory"], facts["shared_memory"]
    found = {
        "host": f"{facts['host']}, {facts['platform']}, {facts['cores']} cores",
        "python": facts["python"],
        "paddle": facts["paddle"] + (f", CUDA {facts['paddle_cuda']}" if facts["paddle_cuda"] else ", for CPUs"),
        "device": _device(facts),
        "driver": facts["driver"] or "no NVIDIA driver",
        "memory": f"{_gib(memory.get('available', 0))} available of {_gib(memory.get('total', 0))}",
        "/dev/shm": f"{_gib(shared['free'])} free of {_gib(shared['total'])}" if shared else "not mounted",
    }
    flashinfer = {name: version for name, version in facts["versions"].items() if name.startswith("flashinfer")}
    others = {name: version for name, version in facts["versions"].items() if name not in flashinfer}
    found["flashinfer"] = _listed(flashinfer) or "not installed"
    found["flashinfer cache"] = facts["flashinfer_cache"] + ("" if facts["flashinfer_cache_exists"] else " (not there)")
    found["torch and parts"] = _listed({**others, "torch": others.get("torch") or "not installed"})
    if facts["environment"]:
        found["environment"] = " ".join(f"{name}={value}" for name, value in facts["environment"].items())
    else:
        found["environment"] = "nothing set"
    return found


def _device(facts: dict[str, Any]) -> str:
    gpu = facts["gpu"]
    if gpu is None:
        return facts["device"] + (f" ({facts['num_gpus']} GPUs seen)" if facts["num_gpus"] else "")
    if "error" in gpu:
        return f"{facts['device']}: {gpu['error']}"
    return f"{facts['device']}, {gpu['name']}, {_gib(gpu['memory_bytes'])}, driver for CUDA {gpu['driver_cuda']}"


def _peers(matrix: list[list[bool]] | None) -> Iterator[str]:
    if matrix is None:
        yield _row("peer access", "no GPUs")
        return
    missing = [f"{a} -> {b}" for a, row in enumerate(matrix) for b, can in enumerate(row) if not can]
    yield _row("peer access", "every pair" if not missing else f"missing: {', '.join(missing)}")


def _backends(d: dict[str, Any]) -> Iterator[str]:
    for backend in d["backends"]:
        name = backend["name"] + (" (auto)" if backend["name"] == d["auto"] else "")
        if backend["usable"]:
            yield _row(name, "usable: " + _how(backend, d))
            continue
        yield _row(name, f"no: {backend['reason']}")
        if backend["meaning"]:
            yield _row("", backend["meaning"])
        if backend["action"]:
            yield _row("", f"-> {backend['action']}")
    yield _row("plain", "always: Paddle's own all-reduce, then addition and norm")


def _how(backend: dict[str, Any], d: dict[str, Any]) -> str:
    if not backend["tried"]:
        return "nothing speaks against it on this rank; --ranks 2 tries it"
    return (
        f"opened and self-tested on {d['num_ranks']} ranks in {backend['seconds']:.2f} s, fused up to "
        f"{backend['limit']} tokens of {d['hidden_size']} x {d['dtype']}, workspace "
        f"{backend['workspace_bytes'] / 2**20:.3g} MiB a rank"
    )


def _verdict(d: dict[str, Any]) -> str:
    usable = [backend["name"] for backend in d["backends"] if backend["usable"]]
    if not usable:
        return "No fused backend can be used here; everything runs on the plain path. See docs/troubleshooting.md."
    if d["auto"] in usable:
        return "Fusion works here: give --enable-flashinfer-allreduce-fusion."
    return (
        f"Fusion works here with --enable-flashinfer-allreduce-fusion --flashinfer-allreduce-fusion-backend {usable[0]}"
    )


def _row(name: str, text: str) -> str:
    return f"{name:<17} {text}"


def _listed(versions: dict[str, str | None]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items() if version is not None)


def _gib(count: int) -> str:
    return f"{count / 2**30:.1f} GiB"
