"""What the GPU tools share: a world under torchrun or Paddle's launcher, numbers in and out, timing, a watchdog.

On a GPU that Paddle's own kernels were not built for (Paddle 2.6 on Hopper) nothing here launches one: tensors are made
by copies from numpy and read by copies back.
"""

from __future__ import annotations

import faulthandler
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np


def start(limit_s: float) -> Any:
    """Form the world; its RankGroup. Every rank ends itself after `limit_s` seconds, whatever it waits for then."""
    faulthandler.dump_traceback_later(limit_s, exit=True)
    if "LOCAL_RANK" in os.environ and "PADDLE_TRAINERS_NUM" not in os.environ:
        _follow_torchrun()
    os.environ.setdefault("GLOG_minloglevel", "2")
    os.environ.setdefault("FDFUSION_OPEN_TIMEOUT_S", "240")  # imports from a cold disk, kernels built on first use
    import paddle

    selected = os.environ.get("FLAGS_selected_gpus", "0")  # noqa: SIM112 (Paddle's name)
    paddle.device.set_device(f"gpu:{selected}")
    from fastdeploy_fusion import groups

    return groups.init_world()


def _follow_torchrun() -> None:
    """Paddle's variables from torchrun's. Must happen before Paddle is imported."""
    env = os.environ
    port, size, rank = int(env["MASTER_PORT"]) + 101, int(env["WORLD_SIZE"]), int(env["RANK"])
    endpoints = [f"127.0.0.1:{port + i}" for i in range(size)]
    for name in ("MASTER_ADDR", "MASTER_PORT"):  # torchrun's own store listens there
        env[f"TORCHRUN_{name}"] = env.pop(name)
    env.update(
        PADDLE_TRAINER_ID=str(rank),
        PADDLE_TRAINERS_NUM=str(size),
        PADDLE_TRAINER_ENDPOINTS=",".join(endpoints),
        PADDLE_CURRENT_ENDPOINT=endpoints[rank],
        FLAGS_selected_gpus=env["LOCAL_RANK"],
    )


def say(group: Any, *words: Any) -> None:
    """Print on the first rank, at once."""
    if group.rank == 0:
        print(*words, flush=True)


def rounded(values: np.ndarray, dtype: str) -> np.ndarray:
    """float32 values after a rounding to `dtype`."""
    from fastdeploy_fusion.host_values import from_bits, to_bits

    return from_bits(to_bits(values, dtype))


def tensor(values: np.ndarray, dtype: str) -> Any:
    """A Paddle tensor on this rank's GPU."""
    from fastdeploy_fusion.host_values import from_numpy

    return from_numpy(values, dtype)


def values_of(result: Any) -> np.ndarray:
    """The float32 values of a tensor."""
    from fastdeploy_fusion.host_values import from_bits

    return from_bits(result.numpy())


def torch_view(result: Any) -> Any:
    """A torch tensor over the same memory."""
    import paddle
    import torch

    return torch.utils.dlpack.from_dlpack(paddle.utils.dlpack.to_dlpack(result))


def paddle_stream() -> int:
    import paddle

    return int(paddle.device.cuda.current_stream().cuda_stream)


def on_paddle_stream() -> Any:
    """torch's launches go to Paddle's current stream."""
    import torch

    return torch.cuda.stream(torch.cuda.ExternalStream(paddle_stream()))


def live_backend(fusion: Any) -> Any:
    """The trtllm backend inside a fusion: routes and launch options are not part of the public API."""
    found = fusion
    while not hasattr(found, "make_launcher"):
        found = found._backend
    return found


def synchronize() -> None:
    from fastdeploy_fusion.backends.flashinfer import driver

    driver.synchronize()


def timed(group: Any, run: Callable[[], Any], calls: int, repeats: int) -> float:
    """Microseconds a call: median over repeats of `calls` calls of `run` with the GPU idle before and after, then the
    slowest rank's."""
    times = []
    for _ in range(repeats):
        synchronize()
        group.barrier()
        began = time.perf_counter()
        for _ in range(calls):
            run()
        synchronize()
        times.append((time.perf_counter() - began) / calls * 1e6)
    return max(group.all_gather_object(statistics.median(times)))


def host_timed(group: Any, run: Callable[[], Any], calls: int, repeats: int) -> float:
    """Microseconds of host time that one call of `run` takes, the GPU left to catch up after each burst."""
    times = []
    for _ in range(repeats):
        synchronize()
        group.barrier()
        began = time.perf_counter()
        for _ in range(calls):
            run()
        times.append((time.perf_counter() - began) / calls * 1e6)
        synchronize()
    return max(group.all_gather_object(statistics.median(times)))


def versions() -> dict[str, str]:
    import importlib.metadata

    import paddle

    found = {"python": sys.version.split()[0], "paddle": paddle.__version__, "numpy": np.__version__}
    for name in ("torch", "flashinfer-python", "flashinfer-python-paddle", "apache-tvm-ffi"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found
