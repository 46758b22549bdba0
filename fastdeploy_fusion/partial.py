"""``PartialSum``: a tensor that its group still has to add up."""

from typing import TYPE_CHECKING, Any, NoReturn

from .errors import FusionError

if TYPE_CHECKING:
    from .fusion import AllReduceFusion


class _NotATensor(TypeError, AttributeError):
    """An AttributeError too, so that ``hasattr`` and ``getattr`` with a default say that there is no such thing."""


class PartialSum:
    """This rank's share of a sum over ``fusion``'s group.

    It has no arithmetic. A norm consumes it (reduced, added and normalised in one step), ``complete()`` turns it into
    a tensor, and anything else is a ``TypeError``. It can be consumed once, so "reduced twice" can't be written down.
    """

    __slots__ = ("_tensor", "fusion", "site")

    def __init__(self, tensor: Any, fusion: "AllReduceFusion", site: str = "") -> None:
        """``site``: the weight prefix of the layer that owes the sum, for the counters."""
        self._tensor = tensor
        self.fusion = fusion
        self.site = site

    @property
    def shape(self) -> list[int]:
        return self._peek().shape

    @property
    def dtype(self) -> Any:
        return self._peek().dtype

    def complete(self) -> Any:
        """The sum over the group, as a new tensor of the same shape and dtype. Every rank of the group must call it."""
        return self.fusion.all_reduce(self.take(), self.site)

    def take(self) -> Any:
        """Hand over the unreduced tensor. Whoever calls this owes the reduction; a second call raises."""
        tensor = self._peek()
        self._tensor = None
        return tensor

    def _peek(self) -> Any:
        if self._tensor is None:
            raise FusionError("this partial sum was already consumed; keep the tensor that its consumer returned")
        return self._tensor

    def _refuse(self, *_: Any) -> NoReturn:
        raise _NotATensor(
            "a PartialSum is not a tensor: its ranks still have to add it up. Give it to RMSNorm, or call complete()"
        )

    __add__ = __radd__ = __iadd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __matmul__ = __rmatmul__ = _refuse
    __truediv__ = __rtruediv__ = __neg__ = __getitem__ = __len__ = __iter__ = __bool__ = __float__ = _refuse
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __pow__ = __rpow__ = __abs__ = __contains__ = _refuse
    __array__ = __dlpack__ = _refuse
    __hash__ = object.__hash__

    def __getattr__(self, name: str) -> Any:
        """What tensors have and this has not: ``place``, ``reshape``, ``numpy``, ..."""
        if name.startswith("__"):
            raise AttributeError(name)
        self._refuse()

    def __repr__(self) -> str:
        state = "consumed" if self._tensor is None else f"shape={self._tensor.shape}, dtype={self._tensor.dtype}"
        return f"PartialSum({state}, ranks={list(self.fusion.group.ranks)})"
