"""``AllReduceFusion``: what layers and scripts hold. One object a group of ranks that reduce together."""

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Any

import paddle

from . import faults, groups, workspace
from .backends.plain import PlainBackend
from .config import FusionConfig
from .groups import RankGroup
from .ledger import Ledger, Verdict
from .partial import PartialSum
from .policy import Decision, GroupState, Op, Path, Request, decide


class AllReduceFusion:
    """Sums over one group, fused with the residual addition and the norm where that is agreed to work.

    Make it with ``open``, at start-up, and close it: ``with AllReduceFusion.open(...) as fusion``. All ranks of the
    group make the same calls in the same order on operands of equal shape and dtype; that order is one for all objects
    over the same ranks, which share a workspace. Not for several threads at once.

    Attributes:
        group: the ranks. rank, world_size: in-group rank and size.
        state: what start-up agreed on, as the policy sees it. dtype: the activations' that it was opened for.
    """

    def __init__(
        self,
        group: RankGroup,
        config: FusionConfig | None = None,
        held: tuple[workspace.Workspace, GroupState] | None = None,
        *,
        dtype: str = "float32",
        owns_group: bool = False,
    ) -> None:
        """Without ``held`` (see ``open``) every call takes the plain path, with the reason 'not initialised'."""
        self.group = group
        self.config = config or FusionConfig()
        self.rank = group.rank
        self.world_size = group.size
        self.dtype = dtype
        self.state = held[1] if held is not None else GroupState(group.size)
        self._workspace = held[0] if held is not None else None
        self._closed = False
        self._owns_group = owns_group
        self._plain = faults.sabotage(PlainBackend(group, self.config.deterministic), group.ranks[group.rank])
        self._ledger = Ledger(self.state, self.config, logs=self.rank == 0)

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
            ValueError: a size or dtype out of range, or a config whose ``auto`` is not settled.
            WorkspaceError: a graph is being captured.
            PeerLost: a rank died or did not come.
        """
        if hidden_size < 1:
            raise ValueError(f"hidden_size is {hidden_size}; it must be at least 1")
        config = config or FusionConfig()
        if config.auto:
            raise ValueError("config.auto is not decided yet; call config.settle(architecture, ...) first")
        members = group if group is not None else groups.init_world()
        held = workspace.acquire(members, config, hidden_size, dtype)
        return cls(members, config, held, dtype=dtype, owns_group=group is None)

    def defers(self, marked: bool) -> bool:
        """Whether a site returns ``PartialSum``: it is marked, fusion is on, and there is something to add up."""
        return marked and self.config.enabled and self.world_size > 1

    @property
    def counters(self) -> Counter[Verdict]:
        """``(op, path, reason) -> calls`` so far, a copy; one call is one reduction of one sum."""
        return self._ledger.counters()

    @property
    def site_counters(self) -> Counter[tuple[str, str, str, str]]:
        """``(site, op, path, reason) -> calls`` so far, a copy. See ``metrics.py`` for Prometheus."""
        return self._ledger.site_counters()

    def partial(self, tensor: Any, site: str = "") -> PartialSum:
        """Mark a tensor as this rank's share of a sum over the group. ``site``: the weight prefix to count it under."""
        return PartialSum(tensor, self, site)

    def add_rms_norm(
        self, partial: PartialSum | Any, residual: Any | None, weight: Any, eps: float, weight_bias: float = 0.0
    ) -> tuple[Any, Any]:
        """``residual_out = sum over ranks + residual``; ``norm_out = rms_norm(residual_out) * (weight + weight_bias)``.

        Args:
            partial: this rank's share, ``[num_tokens, hidden]``, as ``PartialSum`` or as a tensor.
            residual: same shape and dtype, equal on all ranks; None: nothing is added.
            weight: ``[hidden]``, any float dtype. weight_bias: 1 for Gemma, whose checkpoints hold ``weight - 1``.

        Returns:
            ``(norm_out, residual_out)``: new tensors of the operand's shape and dtype. On a CPU they are rounded once
            (reference.py); FlashInfer's kernels round the sum, and then the result, to the operand's dtype.

        Raises:
            TypeError, ValueError: operands that no path can take, on every rank alike, before any collective.
            PeerLost, FusionError: a peer died, or brought another shape.
        """
        x, site = self._unwrap(partial, "")
        decision = self._ledger.decide(Op.ADD_RMS_NORM, x, residual, weight, site, weight_bias)
        if decision.path is Path.FUSED:
            return self._fused_add_rms_norm(x, residual, weight, eps, weight_bias)
        if decision.path is Path.EMPTY:
            return _no_rows(x), _no_rows(x)
        reduce = self._fused_all_reduce if decision.path is Path.SUMMED else None
        return self._plain.add_rms_norm(x, residual, weight, eps, weight_bias, reduce=reduce)

    def all_reduce(self, partial: PartialSum | Any, site: str = "") -> Any:
        """The sum over ranks as a new tensor of the same shape and dtype (the operand itself on one rank).

        ``site``: the weight prefix to count it under; a ``PartialSum`` brings its own.
        """
        x, site = self._unwrap(partial, site)
        if self.world_size == 1:
            return x
        decision = self._ledger.decide(Op.ALL_REDUCE, x, None, None, site)
        if decision.path is Path.FUSED:
            return self._fused_all_reduce(x)
        return _no_rows(x) if decision.path is Path.EMPTY else self._plain.all_reduce(x)

    def all_gather(self, tensor: Any) -> Any:
        """All ranks' tensors side by side on the last axis, in rank order. Equal shapes on all ranks. Not counted.

        Through shared memory where the group has it (gloo stalls for milliseconds in one call of ten) and fusion is on,
        else Paddle's.
        """
        self._ledger.check_open()
        if self.world_size == 1:
            return tensor
        backend = self._workspace.backend if self._workspace is not None and self.config.enabled else None
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
        dtype: str | None = None,
        weight_dtype: str | None = None,
        has_residual: bool = True,
        has_weight_bias: bool = False,
    ) -> Decision:
        """What a call would do and why, without doing it. Not collective.

        ``dtype`` None: the one that was opened for; ``weight_dtype`` None: as ``dtype``.
        """
        self._ledger.check_open()
        dtype = dtype or self.dtype
        request = Request(op, tuple(shape), dtype, weight_dtype or dtype, has_residual, has_weight_bias)
        return decide(request, self.state, self.config)

    def status(self) -> str:
        """Whether small batches are fused here, why, and what decided it; as the counters will show. Not collective."""
        decision = self.explain([1, self.state.hidden_size])
        state = "on" if decision.path is Path.FUSED else "off"
        by = f"; decided by {self.config.decided_by}" if self.config.decided_by else ""
        return f"{state} ({str(decision).partition(': ')[2]}){by}"

    def set_enabled(self, enabled: bool) -> None:
        """Switch fusing off, or on again, between two steps. Collective: all ranks switch at the same call.

        Nothing is opened: what was off at start-up has no workspace, and stays plain with that reason. Layers keep
        leaving their sums to the norms, which then take the plain path. Captured graphs keep what they captured.

        Raises:
            FusionError: the ranks ask for different states; none of them switches.
        """
        self._ledger.check_open()
        self.group.check_equal(enabled, "set_enabled")
        self.config = dataclasses.replace(self.config, enabled=enabled, decided_by="set_enabled")
        self._ledger.reconfigure(self.config)

    def freeze(self) -> None:
        """Promise that the workspace's addresses stay until ``close``: call it once graphs were captured."""
        self._ledger.check_open()
        if self._workspace is not None:
            self._workspace.frozen = True

    def close(self) -> None:
        """Give the workspace back if this was its last user. Idempotent. Collective only on GPUs."""
        held, self._workspace = self._workspace, None
        if self._closed:
            return
        self._closed = True
        self._ledger.close()
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

    def _fused_all_reduce(self, x: Any) -> Any:
        rows = x if x.is_contiguous() else x.contiguous()
        if rows.ndim == 2:
            return self._backend.all_reduce(rows)
        return self._backend.all_reduce(rows.reshape([-1, rows.shape[-1]])).reshape(x.shape)

    def _fused_add_rms_norm(
        self, x: Any, residual: Any, weight: Any, eps: float, weight_bias: float
    ) -> tuple[Any, Any]:
        if not x.is_contiguous():
            x = x.contiguous()
        if not residual.is_contiguous():
            residual = residual.contiguous()
        if not weight.is_contiguous():
            weight = weight.contiguous()
        if x.ndim == 2:
            return self._backend.add_rms_norm(x, residual, weight, eps, weight_bias)
        shape, flat = x.shape, [-1, x.shape[-1]]
        norm, total = self._backend.add_rms_norm(x.reshape(flat), residual.reshape(flat), weight, eps, weight_bias)
        return norm.reshape(shape), total.reshape(shape)

    def _unwrap(self, partial: PartialSum | Any, site: str) -> tuple[Any, str]:
        if not isinstance(partial, PartialSum):
            return partial, site
        if partial.fusion.group.ranks != self.group.ranks:
            raise ValueError(f"the sum is owed by ranks {partial.fusion.group.ranks}, not by {self.group.ranks}")
        return partial.take(), partial.site


def _no_rows(x: Any) -> Any:
    """A new tensor like ``x``, which has no elements: Paddle 2.6 can't clone such a one."""
    return paddle.empty(x.shape, dtype=x.dtype)
