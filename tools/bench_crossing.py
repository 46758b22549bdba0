#!/usr/bin/env python3
"""What it costs the host to bring Paddle tensors into a compiled FFI function, without a GPU.

A real TVM-FFI function with the parameters of FlashInfer's fused kernel that does nothing, so that what is measured is
the crossing and the library around it. Needs apache-tvm-ffi and g++.
"""

from __future__ import annotations

import functools
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

SOURCE = """
#include <tvm/ffi/tvm_ffi.h>
using T = tvm::ffi::TensorView;
using O = tvm::ffi::Optional<T>;
using I = tvm::ffi::Optional<int64_t>;
using D = tvm::ffi::Optional<double>;
void fused(T in, int64_t, int64_t, int64_t, int64_t, T ptrs, bool, bool, bool, bool, int64_t, O, O, O, O, O, O, O, D,
           O, I, I, D) {}
TVM_FFI_DLL_EXPORT_TYPED_FUNC(trtllm_allreduce_fusion, fused);
"""
ORDER = (
    "allreduce_in", "world_size", "world_rank", "token_num", "hidden_dim", "workspace_ptrs", "launch_with_pdl",
    "use_oneshot", "trigger_completion_at_end", "fp32_acc", "pattern_code", "allreduce_out", "residual_in",
    "residual_out", "norm_out", "quant_out", "scale_out", "rms_gamma", "rms_eps", "scale_factor", "layout_code",
    "block_quant_group_size", "weight_bias",
)  # fmt: skip
TOKENS, HIDDEN, EPS = 8, 4096, 1e-6


def compiled(folder: Path) -> Any:
    import tvm_ffi
    from tvm_ffi import libinfo

    (folder / "fused.cc").write_text(SOURCE)
    includes = [f"-I{libinfo.find_include_path()}", f"-I{libinfo.find_dlpack_include_path()}"]
    library = Path(libinfo.find_libtvm_ffi())
    flags = ["-O2", "-std=c++17", "-shared", "-fPIC", *includes]
    link = [f"-L{library.parent}", f"-l:{library.name}", "-o", str(folder / "fused.so")]
    subprocess.run(["g++", *flags, str(folder / "fused.cc"), *link], check=True)
    return tvm_ffi.load_module(str(folder / "fused.so"))


def best(call: Callable[[], Any], calls: int = 5000, repeats: int = 9) -> float:
    """Microseconds a call: the best repeat, since other processes only ever add."""
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        for _ in range(calls):
            call()
        times.append((time.perf_counter() - began) / calls * 1e6)
    return min(times)


def main() -> int:
    import paddle
    import tvm_ffi

    from fastdeploy_fusion.backends.flashinfer import bound, launchers, live, paddle_side

    with tempfile.TemporaryDirectory() as folder:
        module = compiled(Path(folder))
        function = module.trtllm_allreduce_fusion
        x, residual = (paddle.to_tensor(np.ones((TOKENS, HIDDEN), "float32")) for _ in range(2))
        weight, table = paddle.to_tensor(np.ones(HIDDEN, "float32")), paddle.to_tensor(np.arange(7))
        paddle_side.stream_reader = lambda index: lambda: 0  # type: ignore[assignment]
        way = SimpleNamespace(api=SimpleNamespace(has_weight_bias=True), kind="proxy", comm=None)
        site = launchers.Site(2, 0, HIDDEN, "float32", 64, 0)
        backend = live.TrtllmBackend(way, SimpleNamespace(table=table), None, site)  # type: ignore[arg-type]
        backend._binding = bound.Binding(function, ORDER)
        outs = backend._empty(TOKENS), backend._empty(TOKENS)
        tensors = (x, residual, weight, *outs)
        print(f"Paddle {paddle.__version__}, apache-tvm-ffi {tvm_ffi.__version__}; microseconds")

        def show(name: str, call: Callable[[], Any]) -> None:
            call()
            print(f"  {name:64} {best(call):6.2f}", flush=True)

        def capsules() -> list[Any]:
            return [tvm_ffi.from_dlpack(paddle_side.capsule(tensor)) for tensor in tensors]

        show("five fresh DLPack capsules, before any call", capsules)
        for route in ("slots", "direct") if paddle_side.is_exchangeable() else ("slots",):
            backend.use(route)
            at = x.data_ptr(), residual.data_ptr(), weight.data_ptr()
            norm = functools.partial(backend._launcher.norm, TOKENS, x, residual, weight, at, EPS, 0.0, *outs)
            show(f"{route}: five tensors crossed and the function called", norm)
            show(f"{route}: backend.add_rms_norm, outputs made", lambda: backend.add_rms_norm(x, residual, weight, EPS))
            show(f"{route}: backend.all_reduce, output made", lambda: backend.all_reduce(x))
        show("the two outputs alone", lambda: (backend._empty(TOKENS), backend._empty(TOKENS)))
        show("paddle.empty_like twice", lambda: (paddle.empty_like(x), paddle.empty_like(x)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
