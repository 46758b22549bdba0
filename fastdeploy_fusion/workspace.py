"""The life of a workspace: opened once at start-up, shared by all users of its ranks, frozen, closed by the last.

One exact list of ranks has one workspace for each backend and class of dtypes (16-bit and 32-bit: FlashInfer lays its
buffers out for one of them), however many groups have that list. Before ``freeze`` it grows to what its users need
together; afterwards graphs hold its addresses, and a user that needs more gets the plain path.
"""

import dataclasses
import logging
from dataclasses import dataclass
from typing import Any

from . import faults, opening, probe
from .backends import Backend, WorkspacePlan, module_of, resolve
from .config import DTYPES, FusionConfig
from .groups import RankGroup
from .opening import StandDown
from .policy import GroupState

log = logging.getLogger(__name__)

Key = tuple[tuple[int, ...], str, bool]
_open_workspaces: dict[Key, "Workspace"] = {}


@dataclass
class Workspace:
    """One member list's backend, or the reason why there is none. ``plan``: what it is large enough for."""

    key: Key
    plan: WorkspacePlan
    unavailable: str | None = None
    backend: Backend | None = None
    users: int = 0
    frozen: bool = False
    too_large: bool = False  # it is unavailable because some rank had no room for `plan`
    sm: int | None = None
    tuned: dict[str, Any] | None = None

    @property
    def backend_name(self) -> str:
        return self.key[1]

    def state_for(
        self, plan: WorkspacePlan, limits: tuple[int, int] | None = None, refusal: str | None = None
    ) -> GroupState:
        """What the policy needs to know for a user with this plan. Equal on all ranks, as plans and verdicts are.

        ``refusal``: why the workspace could not be grown for this user.
        """
        too_small = None if self.plan.covers(plan) else self._too_small(plan)
        return GroupState(
            world_size=plan.world_size,
            unavailable=self.unavailable or refusal or too_small,
            backend=self.backend_name,
            hidden_size=plan.hidden_size,
            num_max_tokens=limits[0] if limits else plan.num_max_tokens,
            all_reduce_max_tokens=limits[1] if limits else None,
            dtypes=DTYPES if self.backend_name in ("shm", "plain") else (self.plan.dtype,),
            deterministic=self.backend is not None and self.backend.deterministic,
            takes_weight_bias=self.backend is not None and self.backend.takes_weight_bias,
        )

    def _too_small(self, plan: WorkspacePlan) -> str:
        return (
            f"the workspace is frozen at hidden size {self.plan.hidden_size} x {self.plan.num_max_tokens} tokens, and "
            f"{plan.hidden_size} x {plan.num_max_tokens} is asked for; open all users before graphs are captured"
        )

    def release(self) -> None:
        """One user less; the last one closes the backend."""
        self.users -= 1
        if self.users > 0:
            return
        if _open_workspaces.get(self.key) is self:
            del _open_workspaces[self.key]
        self._close_backend()

    def _close_backend(self) -> None:
        if self.backend is not None:
            self.backend.close()
            self.backend = None


def acquire(group: RankGroup, config: FusionConfig, hidden_size: int, dtype: str) -> tuple[Workspace, GroupState]:
    """The workspace of the group's ranks, made or grown if need be, and its state for this user. Collective.

    Raises:
        WorkspaceError: a graph is being captured.
        PeerLost: a rank died or hung beyond rescue.
    """
    key = (group.ranks, resolve(config.backend, probe.device()), dtype == "float32")
    plan, _ = _plan_for(key, WorkspacePlan(group.size, hidden_size, dtype, 1), config, _open_workspaces.get(key))
    if not config.enabled or group.size == 1 or config.backend == "plain":
        reason = "fusion was off at start-up" if not config.enabled else "the plain backend was asked for"
        reason = "one rank" if group.size == 1 else reason
        workspace = Workspace(((), "plain", False), plan, reason, users=1)
        return workspace, workspace.state_for(plan)
    opening.refuse_capture()
    workspace, refusal = _shared(group, config, plan, key)
    workspace.users += 1
    # Limits need the GPU and the measured table, which start-up has gathered by now.
    return workspace, workspace.state_for(*_plan_for(key, plan, config, workspace), refusal)


def _plan_for(
    key: Key, plan: WorkspacePlan, config: FusionConfig, workspace: Workspace | None
) -> tuple[WorkspacePlan, tuple[int, int]]:
    """The plan with the larger of its token limits, and both limits; as far as the workspace knows what they need."""
    limits = opening.token_limits(key[1], config, plan, *((workspace.sm, workspace.tuned) if workspace else ()))
    return dataclasses.replace(plan, num_max_tokens=max(1, *limits)), limits


def _shared(group: RankGroup, config: FusionConfig, plan: WorkspacePlan, key: Key) -> tuple[Workspace, str | None]:
    """The workspace of these ranks, and why it could not be grown for this user if so."""
    workspace = _open_workspaces.get(key)
    if workspace is None:
        workspace = Workspace(key, plan)
        workspace.unavailable = _fill(workspace, group, config, plan)
        _open_workspaces[key] = workspace  # not before: an opening that raised is no verdict
        return workspace, None
    # Nothing is voted on when the workspace is there, so what was compared then is compared now.
    group.check_equal({**probe.settings(config, plan), "frozen": workspace.frozen}, "opening a shared workspace")
    if workspace.unavailable is not None:
        if workspace.too_large and not plan.covers(workspace.plan):  # there may be room for a smaller one
            workspace.plan, workspace.unavailable = plan, _fill(workspace, group, config, plan)
        return workspace, None
    if workspace.plan.covers(plan) or workspace.frozen:
        return workspace, None
    # The old backend serves until the new one is there; its users look it up at each call.
    old = workspace.backend
    refusal = _fill(workspace, group, config, workspace.plan.union(plan))
    if refusal is None and old is not None:
        old.close()
    return workspace, refusal


def _fill(workspace: Workspace, group: RankGroup, config: FusionConfig, plan: WorkspacePlan) -> str | None:
    """Open the backend, or say why not; either way the answer is the same on all ranks, and final."""
    name = workspace.backend_name
    rank = f"rank {group.rank} (global {group.ranks[group.rank]})"
    try:
        opened = opening.open_backend(group, config, name, plan, is_regrown=workspace.tuned is not None)
    except StandDown as stand_down:
        reason = f"{name}: {stand_down}"
        workspace.too_large = stand_down.step == "preflight"
        log.warning("%s: no fused all-reduce for ranks %s, %s", rank, list(group.ranks), reason)
        return reason
    workspace.plan, workspace.sm, workspace.tuned = opened.plan, opened.sm, opened.tuned
    workspace.backend = faults.sabotage(opened.backend, group.ranks[group.rank])
    if group.rank == 0:
        plan = workspace.plan
        log.info("fused all-reduce for ranks %s: %s, hidden %d %s, up to %d tokens, %d bytes a rank",
                 list(group.ranks), name, plan.hidden_size, plan.dtype, plan.num_max_tokens,
                 module_of(name).workspace_bytes(plan))  # fmt: skip
    return None
