"""Fused backends: one Protocol for the live object, one for the module that makes it, and the table of both.

A backend is asked in the order probe (each rank for itself), refuse (pure, on all ranks' facts), preflight, create.
opening.py votes after each of them, so that all ranks of a group go on or stand down together.
"""

import dataclasses
import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from ..config import DTYPES

if TYPE_CHECKING:
    from ..groups import RankGroup


@dataclass(frozen=True)
class WorkspacePlan:
    """What a workspace is made for; equal on all ranks (compared at open).

    num_max_tokens: rows of one call; hidden_size: elements of a row; dtype: the activations'.
    """

    world_size: int
    hidden_size: int
    dtype: str
    num_max_tokens: int

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype is {self.dtype!r}; choose one of {', '.join(DTYPES)}")

    def covers(self, other: "WorkspacePlan") -> bool:
        """Whether a workspace for this serves ``other`` too (dtypes of one size)."""
        return other.hidden_size <= self.hidden_size and other.num_max_tokens <= self.num_max_tokens

    def union(self, other: "WorkspacePlan") -> "WorkspacePlan":
        """The smallest plan that covers both."""
        return dataclasses.replace(
            self,
            hidden_size=max(self.hidden_size, other.hidden_size),
            num_max_tokens=max(self.num_max_tokens, other.num_max_tokens),
        )


class Backend(Protocol):
    """A live backend of one group. All ranks of the group make the same calls in the same order with equal shapes.

    Operands: ``partial`` and ``residual`` ``[num_tokens, hidden]``, contiguous, of the plan's dtype; ``weight``
    ``[hidden]``. Results are new tensors that the caller owns; operands are never written.
    """

    name: str
    deterministic: bool
    """Adds in one fixed order whatever the batch."""

    takes_weight_bias: bool
    """Whether ``add_rms_norm`` can add something to the weight."""

    timeout_s: float
    """Longest wait for a peer in a call, where the backend can bound it; at first the creating group's."""

    def add_rms_norm(
        self, partial: Any, residual: Any, weight: Any, eps: float, weight_bias: float = 0.0
    ) -> tuple[Any, Any]:
        """``(norm_out, residual_out)`` as reference.py defines them."""
        ...

    def all_reduce(self, partial: Any) -> Any:
        """The sum over the group."""
        ...

    def close(self) -> None:
        """Give everything back. Idempotent; never waits for a peer that is gone."""
        ...


class BackendModule(Protocol):
    """What a backend's module exposes. Two constants may be there too: ``OPEN_TIMEOUT_S``, seconds that a start-up step
    needs when the environment does not say (kernels that are compiled on first use take minutes), and
    ``NUM_MAX_TOKENS``, up to how many tokens it is ahead where nobody has measured."""

    def probe(self, device: str) -> dict[str, Any]:
        """Facts of this rank, JSON-able; never raises. ``"refusal"``: None, or why this rank can't take part.
        ``"sm"``: compute capability as 90, where there is a GPU."""
        ...

    def refuse(self, facts: list[dict[str, Any]], plan: WorkspacePlan) -> str | None:
        """Why the group can't use the backend, None if it can. Pure; the same answer on all ranks."""
        ...

    def workspace_bytes(self, plan: WorkspacePlan) -> int:
        """Bytes that one rank takes. Pure."""
        ...

    def preflight(self, plan: WorkspacePlan) -> None:
        """Raise with the reason if this rank's memory is short."""
        ...

    def create(self, group: "RankGroup", plan: WorkspacePlan) -> Backend:
        """Make the live backend. Collective over the group, which is the backend's own: ``close`` hangs it up."""
        ...


MODULES = {"plain": "plain", "shm": "shm", "trtllm": "flashinfer", "mnnvl": "flashinfer.mnnvl"}
"""Backend name -> module of this package."""


def module_of(name: str) -> BackendModule:
    """The module of a backend, imported on first use (a GPU backend brings heavy imports)."""
    return importlib.import_module(f".{MODULES[name]}", __name__)


def resolve(name: str, device: str) -> str:
    """``auto`` -> what is proven on the device: trtllm on GPUs, shm on CPUs."""
    if name != "auto":
        return name
    return "shm" if device == "cpu" else "trtllm"
