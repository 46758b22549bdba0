"""Why a backend can't be used on a machine: the platform, and FlashInfer."""

from .remedy import Remedy

PLATFORM = (
    Remedy(
        r"NVIDIA GPUs only",
        "Paddle runs on the CPU here, and this backend needs a GPU.",
        "On a CPU use `shm` (what `auto` does). With a GPU install `paddlepaddle-gpu` and check "
        '`paddle.device.get_device()`; `paddle.device.set_device("gpu:0")` chooses it.',
    ),
    Remedy(
        r"no NVIDIA driver",
        "libcuda.so.1 is not on the library path.",
        "Install the NVIDIA driver, or start the container with GPU access (`--gpus all`).",
    ),
    Remedy(
        r"is not among the \S+ that this process sees",
        "Paddle's device number is outside what CUDA_VISIBLE_DEVICES leaves.",
        "Set CUDA_VISIBLE_DEVICES so that every rank sees all GPUs of the group.",
    ),
    Remedy(
        r"\bcu[A-Z]\w+: ",
        "A call of the CUDA driver failed; its own words follow.",
        "Check `nvidia-smi` on the host.",
    ),
    Remedy(
        r"SM\d+ is not among the architectures",
        "FlashInfer's fused kernels are used on Hopper and Blackwell only.",
        "Nothing on this GPU: the plain path serves it.",
    ),
    Remedy(
        r"shared memory serves CPU tensors",
        "The `shm` backend adds up in host memory.",
        "On a GPU use `trtllm` (what `auto` does).",
    ),
    Remedy(
        r"x86 store order",
        "The `shm` backend relies on the order in which x86 makes stores visible.",
        "Use `plain` on this processor.",
    ),
    Remedy(
        r"is not the memory that rank 0 made",
        "A rank opened rank 0's memory through /proc and found something else there.",
        "Let all ranks of a host see the same process ids: one container, or one PID namespace.",
    ),
    Remedy(
        r"needs Linux with memfd",
        "The `shm` backend shares an anonymous file through /proc.",
        "Run on Linux 3.17 or later with /proc mounted.",
    ),
    Remedy(
        r"backend is not built",
        "`mnnvl` is not part of this version.",
        "Use `trtllm`, which serves one host.",
    ),
    Remedy(
        r"^one rank$",
        "The group has one rank: nothing is to be added up.",
        "Nothing.",
    ),
    Remedy(
        r"fusion was off at start-up",
        "It was switched on after `open`, which had made no workspace.",
        "Open with `FusionConfig(enabled=True)`; `set_enabled` then switches it off and on.",
    ),
    Remedy(
        r"plain backend was asked for",
        "`--flashinfer-allreduce-fusion-backend plain` never fuses.",
        "Leave the flag out, or name another backend.",
    ),
)
FLASHINFER = (
    Remedy(
        r"No module named 'flashinfer'",
        "FlashInfer is not installed where this Python looks.",
        "Install `flashinfer-python` with `torch` and `apache-tvm-ffi` beside Paddle, or "
        "`flashinfer-python-paddle` (Paddle 3.3 and later).",
    ),
    Remedy(
        r"No module named 'torch'",
        "Upstream FlashInfer needs a real torch beside Paddle, unless Paddle's torch proxy serves it.",
        "Install `torch`, or use `flashinfer-python-paddle` with Paddle 3.3.",
    ),
    Remedy(
        r"torch proxy",
        "This Paddle can't stand in for torch.",
        "Use Paddle 3.3 or later, or install `torch` and upstream FlashInfer beside it.",
    ),
    Remedy(
        r"all-reduce fusion entries are none of those",
        "FlashInfer's functions are not as in any version that was studied.",
        "Install FlashInfer 0.4.1 to 0.6.6 or 0.6.18 to 0.7.4.",
    ),
    Remedy(
        r"FlashInfer can't be used",
        "Each way to import FlashInfer failed, for the reasons that follow.",
        "Make one of the ways work; most often a package is missing or of another version.",
    ),
    Remedy(
        r"compiled (module|function)|pass its arguments on|passes on|plain function around",
        "FlashInfer's wrapper is not the pass-through that can be bound; its slower public call is used.",
        "Nothing; for less host time a call, use a FlashInfer version listed in tests/data/flashinfer_api.json.",
    ),
    Remedy(
        r"TVM-FFI tensors",
        "The installed apache-tvm-ffi lays tensors out in an unknown way; views are crossed by DLPack instead.",
        "Nothing; it costs host time.",
    ),
)
