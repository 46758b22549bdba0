"""The life of a workspace: opened once at start-up by all ranks of its group or by none, shared, frozen, closed.

Opening has five steps: probe, decide, preflight, create, self_test. Each ends in a vote over the group's CPU-side
channel, so that all ranks go on or all stand down, with one reason. The verdict is kept; nothing is retried in forward.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from . import env, faults, probe, self_test
from .backends import Backend, WorkspacePlan, module_of, resolve
from .config import FusionConfig
from .deadline import run_within
from .errors import PeerLost, WorkspaceError
from .groups import RankGroup
from .policy import GroupState, limit_tokens

log = logging.getLogger(__name__)

_open_workspaces: dict[tuple[int, ...], "Workspace"] = {}
"""By exact member list: identical groups share one, and groups of equal size with other members never do."""


@dataclass
class Workspace:
    """One group's backend, or the reason why there is none."""

    ranks: tuple[int, ...]
    plan: WorkspacePlan
    state: GroupState
    backend: Backend | None
    users: int = 0
    frozen: bool = False

    def release(self) -> None:
        """One user less; the last one closes the backend."""
        self.users -= 1
        if self.users > 0:
            return
        if _open_workspaces.get(self.ranks) is self:
            del _open_workspaces[self.ranks]
        if self.backend is not None:
            self.backend.close()
            self.backend = None


class _StandDown(Exception):
    """All ranks agreed not to use the backend; the text is the common reason."""


def acquire(group: RankGroup, config: FusionConfig, hidden_size: int, dtype: str) -> Workspace:
    """The group's workspace: the open one if it fits, else a new one. Collective over the group, at start-up.

    Raises:
        WorkspaceError: an open workspace of these ranks was made for something else, or a graph is being captured.
        PeerLost: a rank died or hung beyond rescue.
    """
    name = resolve(config.backend, probe.device())
    limit = limit_tokens(config, None, group.size, hidden_size, dtype)
    plan = WorkspacePlan(group.size, hidden_size, dtype, limit)
    workspace = _open_workspaces.get(group.ranks)
    if workspace is None:
        _refuse_capture()
        workspace = _open(group, config, name, plan)
        _open_workspaces[group.ranks] = workspace
    elif (workspace.plan.hidden_size, workspace.plan.dtype) != (hidden_size, dtype):
        raise WorkspaceError(
            f"ranks {list(group.ranks)} have a workspace for hidden size {workspace.plan.hidden_size} "
            f"{workspace.plan.dtype}, and {hidden_size} {dtype} is asked for; close the first, or open it for both"
        )
    workspace.users += 1
    return workspace


def _refuse_capture() -> None:
    from paddle.base import core

    capturing = getattr(core, "is_cuda_graph_capturing", lambda: False)
    if capturing():
        raise WorkspaceError("a workspace can't be made while a CUDA graph is being captured; open it before")


def _open(group: RankGroup, config: FusionConfig, name: str, plan: WorkspacePlan) -> Workspace:
    if not config.enabled or group.size == 1 or name == "plain":
        reason = None if group.size == 1 or not config.enabled else "the plain backend was asked for"
        return Workspace(group.ranks, plan, GroupState(group.size, unavailable=reason), None)
    opening = _Opening(group, config, name, plan)
    try:
        backend, sm = opening.run()
    except _StandDown as stand_down:
        reason = f"{name}: {stand_down}"
        log.warning("rank %d (global %d): no fused all-reduce for ranks %s, %s", group.rank,
                    group.ranks[group.rank], list(group.ranks), reason)  # fmt: skip
        return Workspace(group.ranks, plan, GroupState(group.size, unavailable=reason), None)
    plan = opening.plan
    state = GroupState(
        group.size, None, name, plan.hidden_size, plan.num_max_tokens, deterministic=backend.deterministic
    )
    if group.rank == 0:
        log.info("fused all-reduce for ranks %s: %s, hidden %d %s, up to %d tokens, %d bytes a rank",
                 list(group.ranks), name, plan.hidden_size, plan.dtype, plan.num_max_tokens,
                 module_of(name).workspace_bytes(plan))  # fmt: skip
    return Workspace(group.ranks, plan, state, backend)


class _Opening:
    """The five steps for one group."""

    def __init__(self, group: RankGroup, config: FusionConfig, name: str, plan: WorkspacePlan) -> None:
        self.group = group
        self.config = config
        self.name = name
        self.plan = plan
        self.timeout_s = env.seconds("FDFUSION_OPEN_TIMEOUT_S") / 2  # a step and its vote together stay under it
        fault = faults.planned()
        self.fault = fault if fault is not None and fault.rank == group.ranks[group.rank] else None

    def run(self) -> tuple[Backend, int | None]:
        module = module_of(self.name)
        facts = self._agree("probe", lambda: probe.rank_facts(self.name, self.config, self.plan))
        sm = facts[0].get("sm")
        limit = limit_tokens(self.config, sm, self.plan.world_size, self.plan.hidden_size, self.plan.dtype)
        self.plan = WorkspacePlan(self.plan.world_size, self.plan.hidden_size, self.plan.dtype, limit)
        refusals = self._agree("decide", lambda: [probe.compare(facts) or module.refuse(facts, self.plan)])
        if refusals[0][0] is not None:
            raise _StandDown(refusals[0][0])
        self._agree("preflight", lambda: [module.preflight(self.plan)])
        backend = self._create(module)
        try:
            self._agree("self_test", lambda: [self_test.run(backend, self.group.rank, self.plan)])
        except BaseException:
            backend.close()
            raise
        return backend, sm

    def _create(self, module: Any) -> Backend:
        made: list[Backend] = []

        def create() -> list[str]:
            made.append(module.create(self.group, self.plan))
            return [made[0].name]

        try:
            self._agree("create", create)
        except BaseException:
            for backend in made:
                backend.close()
            raise
        return made[0]

    def _agree(self, step: str, work: Callable[[], Any]) -> list[Any]:
        """Do a step within the time limit, then vote: all ranks' results, or ``_StandDown`` on all of them."""
        result, reason = None, None
        try:
            result = run_within(lambda: self._work(step, work), self.timeout_s, step)
            if result is None:
                reason = f"{step} returned nothing"
        except PeerLost:
            raise
        except Exception as error:
            reason = f"{step} failed: {type(error).__name__}: {error}"
        votes = self.group.channel.exchange([reason, result], f"vote on {step}", self.timeout_s * 2)
        for rank, (refusal, _) in enumerate(votes):
            if refusal is not None:
                raise _StandDown(f"{self.group.channel.name_of(rank)}: {refusal}")
        return [outcome for _, outcome in votes]

    def _work(self, step: str, work: Callable[[], Any]) -> Any:
        if self.fault is not None and self.fault.step == step:
            return faults.strike(self.fault)
        return work()
