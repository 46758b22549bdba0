"""Keeps stdout for the answer: Paddle, its C++ side and libraries print there when they like."""

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import TextIO


@contextlib.contextmanager
def answer_only_on_stdout() -> Iterator[TextIO]:
    """Yields a stream to the real stdout; meanwhile file descriptor 1, `print` included, leads to stderr."""
    sys.stdout.flush()
    real = os.dup(1)
    os.dup2(2, 1)
    answer = os.fdopen(os.dup(real), "w", encoding="utf-8")
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield answer
        with contextlib.suppress(BrokenPipeError):  # `| head` has read enough
            answer.flush()
    finally:
        with contextlib.suppress(OSError):
            answer.close()
        sys.stdout.flush()  # what was written past the redirection
        os.dup2(real, 1)
        os.close(real)
