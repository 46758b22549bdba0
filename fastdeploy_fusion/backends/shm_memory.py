"""An anonymous file in memory, made by one rank and opened by the others through ``/proc``.

It is private to the user, has no name in any folder, and is gone with its last user. What is opened is checked before
anything is written to it.
"""

import os

from ..errors import FusionError
from .shm_segment import TOKEN_BYTES, start_time_of

_NAME = "fastdeploy_fusion"


def attach(pid: int, start_time: int, fd: int, token: bytes, num_bytes: int) -> int:
    """A descriptor of the first rank's memory; refused before anything is written if it is not exactly that."""
    path = f"/proc/{pid}/fd/{fd}"
    opened = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    is_ours = (
        os.readlink(f"/proc/self/fd/{opened}").startswith(f"/memfd:{_NAME}")
        and os.fstat(opened).st_size == num_bytes
        and os.pread(opened, TOKEN_BYTES, num_bytes - TOKEN_BYTES) == token
    )
    if not is_ours or start_time_of(pid) != start_time:
        os.close(opened)
        raise FusionError(f"{path} is not the memory that rank 0 made for this run; do all ranks see the same /proc?")
    return opened


def make(num_bytes: int, token: bytes) -> int:
    fd = os.memfd_create(_NAME, os.MFD_CLOEXEC)
    try:
        os.posix_fallocate(fd, 0, num_bytes)  # memory that is short shows here, not as SIGBUS in a call
        os.pwrite(fd, token, num_bytes - TOKEN_BYTES)
    except OSError:
        os.close(fd)
        raise
    return fd
