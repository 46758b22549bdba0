"""What a layer does with a sum that its group still owes, decided once, when the layer is built."""

from enum import Enum
from typing import TYPE_CHECKING, Any

from ..sites import Site

if TYPE_CHECKING:
    from ..fusion import AllReduceFusion


class Owed(Enum):
    """``REDUCED``: the layer adds it up. ``DEFERRED``: it returns a ``PartialSum``. ``RAW``: its caller adds it up."""

    REDUCED = "reduced"
    DEFERRED = "deferred"
    RAW = "raw"


def owed_sum(site: Site, tp: "AllReduceFusion", reduce_results: bool) -> Owed:
    """How the sum of ``site`` ends; equal on all ranks, for all arguments are."""
    if not reduce_results:
        if site.marked:
            raise ValueError(
                f"{site.weight_prefix!r} is marked fusable and has reduce_results=False: a sum has one owner; "
                "drop the mark, or let the layer keep its sum"
            )
        return Owed.RAW
    return Owed.DEFERRED if site.marked and tp.defers(True) else Owed.REDUCED


def settle(partial: Any, owed: Owed, tp: "AllReduceFusion", site: str) -> Any:
    """A raw partial sum, turned into what the layer returns. ``site``: the layer's weight prefix, for the counters."""
    if owed is Owed.RAW:
        return partial
    return tp.partial(partial, site) if owed is Owed.DEFERRED else tp.all_reduce(partial, site)
