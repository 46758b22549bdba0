"""Command line: `fastdeploy-fusion COMMAND ...`. Parsing imports neither Paddle nor numpy."""

from .main import main

__all__ = ["main"]
