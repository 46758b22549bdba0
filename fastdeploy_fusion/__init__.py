"""One kernel for what ends each half of a tensor-parallel decoder layer: all-reduce, residual addition, RMSNorm.

Importing this package imports nothing else: the names below are loaded when first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .config import FusionConfig as FusionConfig
    from .config import ParallelConfig as ParallelConfig
    from .config import add_fusion_args as add_fusion_args
    from .config import add_parallel_args as add_parallel_args
    from .fusion import AllReduceFusion as AllReduceFusion
    from .partial import PartialSum as PartialSum
    from .sites import fusable as fusable

__version__ = "0.1.0"

_HOMES = {
    "AllReduceFusion": "fusion",
    "FusionConfig": "config",
    "ParallelConfig": "config",
    "PartialSum": "partial",
    "add_fusion_args": "config",
    "add_parallel_args": "config",
    "fusable": "sites",
}
__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
