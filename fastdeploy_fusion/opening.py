"""How the ranks of a group make a backend together, or all stand down.

Five steps: probe, decide, preflight, create, self_test. Each has a time limit on every rank and ends in a vote over the
group's CPU-side channel, so that all ranks go on or none does, and all know the same reason. Creation talks over a
channel of its own: a rank that fails there hangs up, its peers notice at once, and the vote is still in step.
"""

import dataclasses
import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import paddle
from paddle.base import core

from . import env, faults, probe, self_test, tuned
from .backends import Backend, BackendModule, WorkspacePlan, module_of
from .config import FusionConfig
from .deadline import run_within
from .errors import PeerLost, WorkspaceError
from .groups import RankGroup
from .policy import DEFAULT_NUM_MAX_TOKENS, limit_tokens

log = logging.getLogger(__name__)


class Opened(NamedTuple):
    """A live backend, the plan that it was made for, and what its token limits depend on: the GPUs' compute capability
    (90) and the measured limits that all ranks use (``tuned.agree``)."""

    backend: Backend
    plan: WorkspacePlan
    sm: int | None
    tuned: dict[str, Any]


def token_limits(
    backend: str,
    config: FusionConfig,
    plan: WorkspacePlan,
    sm: int | None = None,
    view: dict[str, Any] | None = None,
) -> tuple[int, int]:
    """The limits of add_rms_norm and of a sum alone, for the plan's shape. Pure."""
    default = getattr(module_of(backend), "NUM_MAX_TOKENS", DEFAULT_NUM_MAX_TOKENS)
    measured = tuned.limits_of(view, plan.world_size, plan.hidden_size, plan.dtype)
    case = (config, sm, plan.world_size, plan.hidden_size, plan.dtype)
    norm = measured.get("add_rms_norm")
    return limit_tokens(*case, norm, default), limit_tokens(*case, measured.get("all_reduce", norm), default)


class StandDown(Exception):
    """All ranks agreed not to use the backend; the text is the common reason, ``step`` the one that failed."""

    def __init__(self, reason: str, step: str) -> None:
        super().__init__(reason)
        self.step = step


def refuse_capture() -> None:
    """Raise ``WorkspaceError`` while a CUDA graph is being captured: creation would end in the graph, or break it."""
    if getattr(core, "is_cuda_graph_capturing", lambda: False)():
        raise WorkspaceError("a workspace can't be made while a CUDA graph is being captured; open it before")


def open_backend(
    group: RankGroup, config: FusionConfig, name: str, plan: WorkspacePlan, *, is_regrown: bool = False
) -> Opened:
    """The live backend and what its users' token limits depend on. Collective.

    ``is_regrown``: the plan's token limit is final, as it covers users whose limits are known.

    Raises:
        StandDown: on all ranks alike, with one reason that names the rank.
        PeerLost: a rank died, or hung where it can't be left behind.
    """
    group.channel.exchange(None, f"open {name}", env.seconds("FDFUSION_JOIN_TIMEOUT_S"))
    opening = _Opening(group, config, name, plan, is_regrown)
    try:
        return Opened(opening.run(), opening.plan, opening.sm, opening.tuned)
    except BaseException:
        opening.abandon()
        raise


class _Opening:
    def __init__(
        self, group: RankGroup, config: FusionConfig, name: str, plan: WorkspacePlan, is_regrown: bool
    ) -> None:
        self.is_regrown = is_regrown
        self.group = group
        self.config = config
        self.name = name
        self.plan = plan
        self.module = module_of(name)
        default_s = getattr(self.module, "OPEN_TIMEOUT_S", None)
        self.step_timeout_s = env.seconds("FDFUSION_OPEN_TIMEOUT_S", default_s) / 2  # ranks come to the vote within it
        self.device = probe.device()
        self.fault = faults.planned(group.ranks[group.rank])
        self.made: list[Backend] = []
        self.fork: RankGroup | None = None
        self.sm: int | None = None
        self.tuned: dict[str, Any] = tuned.no_view(None)

    def run(self) -> Backend:
        module = self.module
        facts = self._agree("probe", lambda: probe.rank_facts(self.name, self.config, self.plan))
        self.sm = facts[0].get("sm")
        if not self.is_regrown:  # else its users' limits were known, and the plan covers them all
            self._fix_limit([fact["tuned"] for fact in facts])
        refusals = self._agree("decide", lambda: [probe.compare(facts) or module.refuse(facts, self.plan)])
        if refusals[0][0] is not None:
            raise StandDown(refusals[0][0], "decide")
        self._agree("preflight", lambda: [module.preflight(self.plan)])
        self.fork = self.group.fork()
        # Who waits for a peer gives up before the step's limit, so that the one that hangs is the one that is named.
        self.fork.timeout_s = self.step_timeout_s * 0.75
        self._agree("create", lambda: self._create(module))
        backend = self.made[0]
        self._agree("self_test", lambda: [self_test.run(backend, self.group.rank, self.plan)])
        self.fork.timeout_s = backend.timeout_s = self.group.timeout_s
        return backend

    def _fix_limit(self, views: list[dict[str, Any]]) -> None:
        """Limits depend on the GPU and on a measured table: both are known, and equal on all ranks, from here on."""
        self.tuned = tuned.agree(views)
        if self.group.rank == 0 and self.config.num_max_tokens is None:
            for note in tuned.notes(views):
                log.warning(note)
        limit = max(1, *token_limits(self.name, self.config, self.plan, self.sm, self.tuned))
        self.plan = dataclasses.replace(self.plan, num_max_tokens=limit)

    def _create(self, module: BackendModule) -> str:
        assert self.fork is not None
        backend = module.create(self.fork, self.plan)
        self.made.append(backend)
        return backend.name

    def abandon(self) -> None:
        """Give back what this rank has made so far; peers that wait for it inside the step notice."""
        if self.fork is not None and self.fork is not self.group:
            self.fork.close()
        for backend in self.made:
            backend.close()
        self.made = []

    def _agree(self, step: str, work: Callable[[], Any]) -> list[Any]:
        """Do a step within the time limit, then vote: all ranks' results, or ``StandDown`` on all of them."""
        result, reason, own = None, None, True
        try:
            result = run_within(lambda: self._work(step, work), self.step_timeout_s, step)
            reason = f"{step} returned nothing" if result is None else None
        except PeerLost as error:
            reason, own = f"{step}: {error}", False
        except Exception as error:
            reason = f"{step} failed: {type(error).__name__}: {error}"
        if reason is not None:
            self.abandon()
        votes = self.group.channel.exchange([reason, own, result], f"vote on {step}", self.step_timeout_s * 2)
        refusals = [(not is_own, rank, text) for rank, (text, is_own, _) in enumerate(votes) if text is not None]
        if refusals:
            _, rank, text = min(refusals)  # a rank's own failure before what others saw of it
            raise StandDown(f"{self.group.channel.name_of(rank)}: {text}", step)
        return [outcome for *_, outcome in votes]

    def _work(self, step: str, work: Callable[[], Any]) -> Any:
        if self.fault is not None and self.fault.step == step:
            return faults.strike(self.fault)
        if self.device != "cpu":
            paddle.device.set_device(self.device)  # CUDA's current device is a thread's own, and steps run in threads
        return work()
