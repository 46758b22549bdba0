"""``AllReduceFusion``: what layers and scripts hold. One object a group of ranks that reduce together."""

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import paddle

from . import faults, groups, workspace
from .backends.plain import PlainBackend
from .config import DTYPES, FusionConfig
from .errors import WorkspaceError
from .groups import RankGroup
from .partial import PartialSum
from .policy import Decision, GroupState, Op, Path, Request, decide

_DTYPE_NAMES = {getattr(paddle, name): name for name in DTYPES}
_DTYPES_ARE_SINGLE = not hasattr(paddle.float32, "value")
_MAX_KNOWN = 8192


class AllReduceFusion:
    """Sums over one group, fused with the residual addition and the norm where that is agreed to work.

    Make it with ``open``, at start-up, and close it: ``with AllReduceFusion.open(...) as fusion``. All ranks of the
    group make the same calls in the same order on operands of equal shape and dtype.

    Attributes:
        group: the ranks. rank, world_size: in-group rank and size.
        state: what start-up agreed on, as the policy sees it.
        counters: ``(op, path, reason) -> calls``; one entry of one call is one reduction of one sum.
    """

    def __init__(
        self,
        group: RankGroup,
        config: FusionConfig | None = None,
        held: tuple[workspace.Workspace, GroupState] | None = None,
        *,
        owns_group: bool = False,
    ) -> None:
        """Without ``held`` (see ``open``) every call takes the plain path, with the reason 'not initialised'."""
        self.group = group
        self.config = config or FusionConfig()
        self.rank = group.rank
        self.world_size = group.size
        self.counters: Counter[tuple[str, str, str]] = Counter()
        self.state = held[1] if held is not None else GroupState(group.size)
        self._workspace = held[0] if held is not None else None
        self._closed = False
        self._owns_group = owns_group
        self._plain = faults.sabotage(PlainBackend(group), group.ranks[group.rank])
        self._known: dict[tuple[Any, ...], _Known] = {}

    @classmethod
    def open(
        cls,
        config: FusionConfig | None = None,
        *,
        group: RankGroup | None = None,
        hidden_size: int,
        dtype: str = "float32",
    ) -> "AllReduceFusion":
        """Agree with the group's other ranks on a backend and make its workspace. Collective, at start-up.

        Args:
            config: equal on all ranks; None: fusion off.
            group: the ranks that add up; None: all ranks of this launch (a plain single process is one rank).
            hidden_size: elements of a row; dtype: the activations', one of float32, bfloat16, float16.

        Raises:
            ValueError: a size or dtype out of range.
            WorkspaceError: a graph is being captured.
            PeerLost: a rank died or did not come.
        """
        if hidden_size < 1:
            raise ValueError(f"hidden_size is {hidden_size}; it must be at least 1")
        config = config or FusionConfig()
        members = group if group is not None else groups.init_world()
        held = workspace.acquire(members, config, hidden_size, dtype)
        return cls(members, config, held, owns_group=group is None)

    def defers(self, marked: bool) -> bool:
        """Whether a site returns ``PartialSum``: it is marked, fusion is on, and there is something to add up."""
        return marked and self.config.enabled and self.world_size > 1

    def partial(self, tensor: Any) -> PartialSum:
        """Mark a tensor as this rank's share of a sum over the group."""
        return PartialSum(tensor, self)

    def add_rms_norm(self, partial: PartialSum | Any, residual: Any | None, weight: Any, eps: float) -> tuple[Any, Any]:
        """``residual_out = sum over ranks + residual``; ``norm_out = rms_norm(residual_out) * weight``.

        Args:
            partial: this rank's share, ``[num_tokens, hidden]``, as ``PartialSum`` or as a tensor.
            residual: same shape and dtype, equal on all ranks; None: nothing is added.
            weight: ``[hidden]``, any float dtype.

        Returns:
            ``(norm_out, residual_out)``: new tensors of the operand's shape and dtype, rounded once (reference.py).

        Raises:
            TypeError, ValueError: operands that no path can take, on every rank alike, before any collective.
            PeerLost, FusionError: a peer died, or brought another shape.
        """
        x = self._unwrap(partial)
        decision = self._decide(Op.ADD_RMS_NORM, x, residual, weight)
        if decision.path is Path.FUSED:
            return self._fused_add_rms_norm(x, residual, weight, eps)
        if decision.path is Path.EMPTY:
            return _no_rows(x), _no_rows(x)
        return self._plain.add_rms_norm(x, residual, weight, eps)

    def all_reduce(self, partial: PartialSum | Any) -> Any:
        """The sum over ranks as a new tensor of the same shape and dtype (the operand itself on one rank)."""
        x = self._unwrap(partial)
        if self.world_size == 1:
            return x
        decision = self._decide(Op.ALL_REDUCE, x, None, None)
        if decision.path is Path.FUSED:
            rows = x if x.is_contiguous() else x.contiguous()
            if rows.ndim == 2:
                return self._backend.all_reduce(rows)
            return self._backend.all_reduce(rows.reshape([-1, rows.shape[-1]])).reshape(x.shape)
        return _no_rows(x) if decision.path is Path.EMPTY else self._plain.all_reduce(x)

    def all_gather(self, tensor: Any) -> Any:
        """All ranks' tensors side by side on the last axis, in rank order. Equal shapes on all ranks.

        Through shared memory where the group has it (gloo stalls for milliseconds in one call of ten), else Paddle's.
        """
        if self.world_size == 1:
            return tensor
        backend = self._workspace.backend if self._workspace is not None else None
        gather = getattr(backend, "all_gather", None)
        if gather is not None and tensor.ndim == 2 and tensor.shape[0] and tensor.dtype == paddle.float32:
            return gather(tensor if tensor.is_contiguous() else tensor.contiguous())
        return paddle.concat(self.group.all_gather(tensor), axis=-1)

    def can_all_reduce(self, shape: Sequence[int], dtype: str) -> bool:
        """Whether ``all_reduce`` of such an operand goes through the fused workspace. Pure, equal on all ranks."""
        return self.explain(shape, op=Op.ALL_REDUCE, dtype=dtype).path is Path.FUSED

    def explain(
        self,
        shape: Sequence[int],
        *,
        op: Op = Op.ADD_RMS_NORM,
        dtype: str = "float32",
        weight_dtype: str | None = None,
        has_residual: bool = True,
    ) -> Decision:
        """What a call would do and why, without doing it. Not collective. ``weight_dtype`` None: as ``dtype``."""
        self._check_open()
        return decide(Request(op, tuple(shape), dtype, weight_dtype or dtype, has_residual), self.state, self.config)

    def freeze(self) -> None:
        """Promise that the workspace's addresses stay until ``close``: call it once graphs were captured."""
        self._check_open()
        if self._workspace is not None:
            self._workspace.frozen = True

    def close(self) -> None:
        """Give the workspace back if this was its last user. Idempotent. Collective only on GPUs."""
        held, self._workspace = self._workspace, None
        if self._closed:
            return
        self._closed = True
        self._known.clear()
        if held is not None:
            held.release()
        if self._owns_group:
            self.group.close()

    def __enter__(self) -> "AllReduceFusion":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def _backend(self) -> Any:
        assert self._workspace is not None  # FUSED was decided
        return self._workspace.backend

    def _check_open(self) -> None:
        if self._closed:
            raise WorkspaceError("this AllReduceFusion is closed; open a new one")

    def _fused_add_rms_norm(self, x: Any, residual: Any, weight: Any, eps: float) -> tuple[Any, Any]:
        if not x.is_contiguous():
            x = x.contiguous()
        if not residual.is_contiguous():
            residual = residual.contiguous()
        if x.ndim == 2:
            return self._backend.add_rms_norm(x, residual, weight, eps)
        shape, flat = x.shape, [-1, x.shape[-1]]
        norm, total = self._backend.add_rms_norm(x.reshape(flat), residual.reshape(flat), weight, eps)
        return norm.reshape(shape), total.reshape(shape)

    def _unwrap(self, partial: PartialSum | Any) -> Any:
        if not isinstance(partial, PartialSum):
            return partial
        if partial.fusion.group.ranks != self.group.ranks:
            raise ValueError(f"the sum is owed by ranks {partial.fusion.group.ranks}, not by {self.group.ranks}")
        return partial.take()

    def _decide(self, op: Op, x: Any, residual: Any | None, weight: Any | None) -> Decision:
        """Decided once for each kind of operand and each weight; later calls cost one look-up, 2 us."""
        key = (
            op,
            tuple(x.shape),
            _dtype_code(x),
            None if residual is None else (tuple(residual.shape), _dtype_code(residual)),
            id(weight),
        )
        known = self._known.get(key)
        if known is None:
            known = self._learn(key, op, x, residual, weight)
        self.counters[known.counter] += 1
        return known.decision

    def _learn(self, key: tuple[Any, ...], op: Op, x: Any, residual: Any | None, weight: Any | None) -> "_Known":
        self._check_open()
        _check_operands(op, x, residual, weight)
        weight_dtype = None if weight is None else _DTYPE_NAMES[weight.dtype]
        request = Request(op, key[1], _DTYPE_NAMES[x.dtype], weight_dtype, residual is not None)
        decision = decide(request, self.state, self.config)
        if len(self._known) >= _MAX_KNOWN:
            self._known.clear()
        known = _Known(decision, (op.value, decision.path.value, decision.reason.value), weight)
        self._known[key] = known
        return known


class _Known(NamedTuple):
    """A decision, its counter, and the weight that the key names by ``id``: held, so that no other gets that id."""

    decision: Decision
    counter: tuple[str, str, str]
    weight: Any


def _dtype_code(tensor: Any) -> int:
    """Equal for equal dtypes. Paddle 3 has one object a dtype; in 2.6 comparing two costs as much as all else here."""
    dtype = tensor.dtype
    return id(dtype) if _DTYPES_ARE_SINGLE else dtype.value


def _no_rows(x: Any) -> Any:
    """A new tensor like ``x``, which has no elements: Paddle 2.6 can't clone such a one."""
    return paddle.empty(x.shape, dtype=x.dtype)


def _check_operands(op: Op, x: Any, residual: Any | None, weight: Any | None) -> None:
    """Refuse what no path can take. Shapes and dtypes are equal on all ranks, so all of them refuse together."""
    for name, operand in (("input", x), ("residual", residual), ("weight", weight)):
        if operand is not None and operand.dtype not in _DTYPE_NAMES:
            raise TypeError(f"{op.value}: {name} is {operand.dtype}; it must be one of {', '.join(DTYPES)}")
    if residual is not None and residual.shape != x.shape:
        raise ValueError(f"{op.value}: residual is {residual.shape} and the input {x.shape}; they must be equal")
    if residual is not None and residual.dtype != x.dtype:
        raise TypeError(f"{op.value}: residual is {residual.dtype} and the input {x.dtype}; cast one to the other's")
    if weight is not None and weight.shape != x.shape[-1:]:
        raise ValueError(f"{op.value}: weight is {weight.shape} and the input {x.shape}; it must be {x.shape[-1:]}")
