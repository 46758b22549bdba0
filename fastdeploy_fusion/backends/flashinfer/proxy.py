"""Paddle's torch proxy, mended so far that released Paddle 3.3 imports FlashInfer through it, and undone on failure.

`paddle.compat` offers FlashInfer Paddle's modules under torch's names. Some names are missing there; each entry below
says what FlashInfer (0.4.1 to 0.7.4) does with it. Only missing names are added, so that a later Paddle wins.
"""

from __future__ import annotations

import sys
import types
from typing import Any

SCOPE = "flashinfer"


class _Version(str):
    """Below every version asked for: FlashInfer then registers no custom ops (Paddle's are not callable)."""

    def __lt__(self, other: object) -> bool:
        return True


class Proxy:
    """The proxy, switched on for FlashInfer alone. `close()` undoes everything that `__init__` did."""

    def __init__(self) -> None:
        import paddle

        try:
            from paddle.compat import proxy
        except ImportError:
            raise ImportError(f"Paddle {paddle.__version__} has no paddle.compat torch proxy (3.3 has)") from None
        if not hasattr(proxy, "_extend_torch_proxy_overrides"):
            raise ImportError(f"Paddle {paddle.__version__}: its torch proxy takes no overrides, which 3.3.1's does")
        self._proxy = proxy
        self._overrides = dict(proxy.GLOBAL_OVERRIDES)
        self._modules: list[tuple[types.ModuleType, str, str]] = []
        self._was_on = proxy.TORCH_PROXY_FINDER in sys.meta_path
        self._scope = set(proxy.TORCH_PROXY_FINDER._local_enabled_scope)
        self._add_missing(paddle)
        proxy.enable_torch_proxy(scope={SCOPE}, silent=True)

    def _add_missing(self, paddle: Any) -> None:
        group = paddle.distributed.communication.group.Group
        self._attribute(paddle.distributed, "ProcessGroup", group)  # type of arguments
        self._module(paddle, "torch_version", TorchVersion=_Version, __version__="2.3.0")
        self._module(paddle.distributed, "_symmetric_memory")  # imported, used only without a communicator
        self._module(paddle.distributed, "distributed_c10d", ProcessGroup=group)
        self._attribute(paddle.device.cuda, "ExternalStream", type("ExternalStream", (), {}), "torch.cuda")
        self._attribute(paddle.device.cuda, "MemPool", type("MemPool", (), {}), "torch.cuda")
        self._attribute(paddle, "float8_e8m0fnu", "float8_e8m0fnu")
        self._attribute(paddle, "float4_e2m1fn_x2", "float4_e2m1fn_x2")
        if isinstance(paddle.device, types.ModuleType) and hasattr(paddle.device, "Device"):
            # torch.device is a class: called (`torch.device("cuda")`) and used in unions (`torch.device | int`)
            device = type("device", (paddle.device.Device,), {"cuda": paddle.device.cuda})
            self._override("torch.device", device)

    def _override(self, name: str, value: Any) -> None:
        self._proxy._extend_torch_proxy_overrides({name: self._proxy.RawOverriddenAttribute(value)})

    def _attribute(self, owner: types.ModuleType, name: str, value: Any, torch_owner: str | None = None) -> None:
        if not hasattr(owner, name):
            self._override(f"{torch_owner or owner.__name__.replace('paddle', 'torch', 1)}.{name}", value)

    def _module(self, parent: types.ModuleType, name: str, **contents: Any) -> None:
        full = f"{parent.__name__}.{name}"
        if full in sys.modules or hasattr(parent, name):
            return
        module = types.ModuleType(full)
        vars(module).update(contents)
        sys.modules[full] = module
        setattr(parent, name, module)
        self._modules.append((parent, name, full))

    def tidy(self) -> None:
        """Take back `torch` names that a late import inside FlashInfer left for everybody."""
        proxy = self._proxy
        if any(isinstance(sys.modules.get(name), proxy.ProxyModule) for name in ("torch", "torch.distributed")):
            proxy._clear_torch_proxy_modules()
            proxy._copy_torch_modules_from_cache()

    def close(self) -> None:
        proxy = self._proxy
        proxy.disable_torch_proxy()
        if not self._was_on:
            # The cache holds what `enable` moved away; it is all back in sys.modules now.
            proxy._clear_torch_proxy_modules()
        proxy.TORCH_PROXY_FINDER._local_enabled_scope = self._scope
        proxy.GLOBAL_OVERRIDES.clear()
        proxy.GLOBAL_OVERRIDES.update(self._overrides)
        for parent, name, full in self._modules:
            sys.modules.pop(full, None)
            if hasattr(parent, name):
                delattr(parent, name)
