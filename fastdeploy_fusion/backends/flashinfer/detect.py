"""Which way FlashInfer can be reached from this process: one real import, on first use, remembered with its reason.

torch: upstream FlashInfer beside a real torch; tensors cross by DLPack.
proxy: FlashInfer over Paddle's torch proxy (Paddle >= 3.3), as FastDeploy uses `flashinfer-python-paddle`.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import sys
import warnings
from dataclasses import dataclass
from typing import Any

from . import api, driver
from .proxy import Proxy

FORK = "flashinfer-python-paddle"


@dataclass(frozen=True)
class Way:
    """A FlashInfer that imported. `torch` is the module that it knows by this name: torch itself, or Paddle's proxy."""

    kind: str
    version: str
    comm: Any
    torch: Any
    api: api.Api
    proxy: Proxy | None


@functools.lru_cache(maxsize=1)
def find_way() -> tuple[Way | None, str]:
    """(the way, "") or (None, why each way failed). The first call imports; the answer stays."""
    reasons = []
    for kind in _order():
        try:
            return _attempt(kind), ""
        except Exception as error:
            reasons.append(f"{kind}: {type(error).__name__}: {error}")
    return None, "FlashInfer can't be used: " + "; ".join(reasons)


def found_way() -> Way | None:
    """What find_way found, without looking now."""
    return find_way()[0] if find_way.cache_info().currsize else None


def _installed(distribution: str) -> bool:
    try:
        importlib.metadata.distribution(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _order() -> tuple[str, ...]:
    """Paddle's own build of FlashInfer is made for the proxy; any other is made for torch."""
    if "flashinfer.comm" in sys.modules:  # somebody imported it before: it stays what it is
        return ("proxy",) if _is_proxied(sys.modules["flashinfer.comm"]) else ("torch",)
    return ("proxy", "torch") if _installed(FORK) else ("torch", "proxy")


def _is_proxied(comm: Any) -> bool:
    return type(_trtllm(comm).torch).__name__ == "ProxyModule"


def _trtllm(comm: Any) -> Any:
    return importlib.import_module(f"{comm.__name__}.trtllm_ar")


def _attempt(kind: str) -> Way:
    """Import by one way; on any failure, everything that the attempt loaded under FlashInfer's name is taken out."""
    before = set(sys.modules)
    proxy = None
    try:
        if kind == "proxy" and "flashinfer.comm" not in sys.modules:
            if importlib.util.find_spec("flashinfer") is None:
                raise ModuleNotFoundError("No module named 'flashinfer'")
            proxy = Proxy()
        elif kind == "torch" and importlib.util.find_spec("torch") is None:
            raise ModuleNotFoundError("No module named 'torch'")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the proxy and FlashInfer's decorators warn for every name that they touch
            comm = importlib.import_module("flashinfer.comm")
        inner = _trtllm(comm)
        version = _version()
        found = api.recognize(comm, version)
        if proxy is not None:
            proxy.tidy()
        return Way(kind, version, comm, inner.torch, found, proxy)
    except Exception:
        for name in set(sys.modules) - before:
            if name == "flashinfer" or name.startswith("flashinfer."):
                del sys.modules[name]
        if proxy is not None:
            proxy.close()
        raise


def _version() -> str:
    return str(getattr(sys.modules["flashinfer"], "__version__", "unknown"))


def _boot_id() -> str:
    """The same for all processes of one running machine, containers included."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()


def probe_rank(device: str) -> dict[str, Any]:
    """Facts of this rank; `device` is Paddle's name, such as "cpu" or "gpu:0"."""
    import paddle

    facts: dict[str, Any] = {"device": device, "refusal": None, "paddle": paddle.__version__}
    if not device.startswith("gpu"):
        facts["refusal"] = f"Paddle's device here is {device!r}, and FlashInfer's kernels run on NVIDIA GPUs only"
        return facts
    facts["host"] = _boot_id()
    try:
        facts |= driver.device_facts(int(device.partition(":")[2] or 0))
    except driver.DriverError as error:
        facts["refusal"] = str(error)
        return facts
    way, reason = find_way()
    if way is None:
        facts["refusal"] = reason
        return facts
    return facts | {"way": way.kind, "flashinfer": way.version, "api": way.api.kind}
