"""What start-up would agree on for a group on some device, without starting: the same rules on facts made up for it."""

import dataclasses
from dataclasses import dataclass
from typing import Any

from . import probe
from .backends import WorkspacePlan, module_of, resolve
from .config import FusionConfig
from .hardware import COMPUTE_CAPABILITIES
from .opening import token_limits
from .policy import GroupState


@dataclass(frozen=True)
class Device:
    """Where ranks would run. ``name``: for people; ``refusal`` and ``tuned``: what one rank found here, if it is here.

    ranks_per_host: neighbouring ranks share a host; None: all of them.
    """

    name: str
    kind: str
    sm: int | None
    ranks_per_host: int | None
    refusal: str | None = None
    tuned: dict[str, Any] | None = None


@dataclass(frozen=True)
class Forecast:
    """A group's state as ``AllReduceFusion`` would have it, and the bytes of its workspace on each rank."""

    state: GroupState
    workspace_bytes: int


def named_gpu(name: str, gpus_per_host: int) -> Device:
    """A GPU by its name in ``COMPUTE_CAPABILITIES``, with a usable FlashInfer and peer access within each host."""
    return Device(name.upper(), "gpu", COMPUTE_CAPABILITIES[name], gpus_per_host)


def this_machine(config: FusionConfig, plan: WorkspacePlan) -> Device:
    """The device that Paddle would use here, with its measured token limits."""
    device = probe.device()
    facts = probe.rank_facts(resolve(config.backend, device), config, plan)
    kind = "cpu" if device == "cpu" else "gpu"
    return Device(device, kind, facts.get("sm"), None, facts["refusal"], facts["tuned"])


def forecast(config: FusionConfig, plan: WorkspacePlan, device: Device) -> Forecast:
    """Pure. ``plan``'s token limit is replaced by the one that start-up would fix."""
    state = GroupState(plan.world_size, None, "plain", plan.hidden_size, max(token_limits("plain", config, plan)))
    if not config.enabled or plan.world_size == 1:
        return Forecast(state, 0)
    if config.backend == "plain":
        return Forecast(dataclasses.replace(state, unavailable="the plain backend was asked for"), 0)
    name = resolve(config.backend, device.kind)
    module = module_of(name)
    norm_limit, sum_limit = token_limits(name, config, plan, device.sm, device.tuned)
    plan = dataclasses.replace(plan, num_max_tokens=max(1, norm_limit, sum_limit))
    refusal = module.refuse(rank_facts(name, plan.world_size, device), plan)
    state = dataclasses.replace(
        state,
        unavailable=None if refusal is None else f"{name}: {refusal}",
        backend=name,
        num_max_tokens=norm_limit,
        all_reduce_max_tokens=sum_limit,
    )
    return Forecast(state, 0 if refusal is not None else module.workspace_bytes(plan))


def rank_facts(backend: str, num_ranks: int, device: Device) -> list[dict[str, Any]]:
    """Facts of ``num_ranks`` ranks on such devices, as the backend's ``probe`` would give them."""
    if device.kind == "cpu" or backend != "trtllm":
        return [module_of(backend).probe("cpu" if device.kind == "cpu" else "gpu:0")] * num_ranks
    per_host = device.ranks_per_host or num_ranks
    hosts = [rank // per_host for rank in range(num_ranks)]
    return [
        {
            "refusal": device.refusal,
            "sm": device.sm,
            "way": "torch",
            "flashinfer": "any",
            "api": "unified",
            "host": host,
            "uuid": f"{host}:{rank}",
            "visible": [f"{host}:{other}" for other in range(num_ranks) if hosts[other] == host],
            "peers": [f"{host}:{other}" for other in range(num_ranks) if hosts[other] == host and other != rank],
        }
        for rank, host in enumerate(hosts)
    ]
