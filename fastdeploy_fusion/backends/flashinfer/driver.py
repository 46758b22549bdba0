"""The few calls of NVIDIA's driver library that the backend needs, by ctypes: the same under every Paddle and torch."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

_MAJOR, _MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_{MAJOR,MINOR}
_CAPTURE_NONE = 0


class DriverError(RuntimeError):
    """A call of the CUDA driver failed; the message has the call and the driver's own words."""


@functools.lru_cache(maxsize=1)
def _library() -> ctypes.CDLL:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise DriverError(f"no NVIDIA driver on this machine ({error})") from None


def _call(name: str, *args: Any) -> None:
    code = getattr(_library(), name)(*args)
    if code:
        text = ctypes.c_char_p()
        _library().cuGetErrorString(code, ctypes.byref(text))
        raise DriverError(f"{name}: {(text.value or b'unknown error').decode()} ({code})")


def _int(name: str, *args: Any) -> int:
    value = ctypes.c_int()
    _call(name, ctypes.byref(value), *args)
    return value.value


def _uuid(device: int) -> str:
    raw = (ctypes.c_ubyte * 16)()
    _call("cuDeviceGetUuid_v2", ctypes.byref(raw), device)
    return bytes(raw).hex()


def device_facts(index: int) -> dict[str, Any]:
    """Compute capability, identity and reachable peers of the device that this process calls `index`.

    `peers` holds the identities of the devices visible here whose memory this one can map.
    """
    _call("cuInit", 0)
    count = _int("cuDeviceGetCount")
    if not 0 <= index < count:
        raise DriverError(f"device {index} is not among the {count} that this process sees")
    devices = [_int("cuDeviceGet", i) for i in range(count)]
    mine = devices[index]
    others = [d for d in devices if d != mine]
    return {
        "sm": 10 * _int("cuDeviceGetAttribute", _MAJOR, mine) + _int("cuDeviceGetAttribute", _MINOR, mine),
        "uuid": _uuid(mine),
        "visible": sorted(_uuid(d) for d in devices),
        "peers": sorted(_uuid(d) for d in others if _int("cuDeviceCanAccessPeer", mine, d)),
    }


def describe(index: int) -> dict[str, Any]:
    """For people: the device's name, its memory in bytes, and the CUDA version that the driver serves."""
    _call("cuInit", 0)
    device = _int("cuDeviceGet", index)
    name, memory = ctypes.create_string_buffer(128), ctypes.c_size_t()
    _call("cuDeviceGetName", name, len(name), device)
    _call("cuDeviceTotalMem_v2", ctypes.byref(memory), device)
    version = _int("cuDriverGetVersion")
    return {
        "name": name.value.decode(errors="replace"),
        "memory_bytes": memory.value,
        "driver_cuda": f"{version // 1000}.{version % 1000 // 10}",
    }


def make_current(index: int) -> None:
    """Make the device's primary context, which Paddle and torch share, the calling thread's."""
    _call("cuInit", 0)
    context = _contexts(index)
    _call("cuCtxSetCurrent", context)


@functools.cache
def _contexts(index: int) -> ctypes.c_void_p:
    """Retained once a process, and kept: the frameworks hold it for as long as they live."""
    context = ctypes.c_void_p()
    _call("cuDevicePrimaryCtxRetain", ctypes.byref(context), _int("cuDeviceGet", index))
    return context


def free_bytes() -> int:
    """Free memory of the current context's device, in bytes."""
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    _call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
    return free.value


def is_capturing(stream: int) -> bool:
    """Whether a CUDA graph is being captured on the stream."""
    return _int_last("cuStreamIsCapturing", ctypes.c_void_p(stream)) != _CAPTURE_NONE


def _int_last(name: str, *args: Any) -> int:
    value = ctypes.c_int()
    _call(name, *args, ctypes.byref(value))
    return value.value


def free(pointer: int) -> None:
    """Give back memory that cudaMalloc or cuMemAlloc gave; waits for the device."""
    _call("cuMemFree_v2", ctypes.c_uint64(pointer))


def close_peer_memory(pointer: int) -> None:
    """Unmap what cudaIpcOpenMemHandle mapped."""
    _call("cuIpcCloseMemHandle", ctypes.c_uint64(pointer))


def synchronize() -> None:
    """Wait for everything queued on the current context's device."""
    _call("cuCtxSynchronize")


def read_words(pointer: int, count: int) -> list[int]:
    """`count` 64-bit words of device memory; waits for the device."""
    words = (ctypes.c_uint64 * count)()
    _call("cuMemcpyDtoH_v2", ctypes.byref(words), ctypes.c_uint64(pointer), ctypes.c_size_t(8 * count))
    return list(words)


def allocate(count: int) -> int:
    """Address of `count` bytes of device memory, to be given to `free`."""
    pointer = ctypes.c_uint64()
    _call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(count))
    return pointer.value
