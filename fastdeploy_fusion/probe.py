"""Facts of this rank for start-up, gathered and compared before anything is allocated. Nothing here raises."""

import os
from typing import Any

import paddle

from .backends import WorkspacePlan, module_of
from .config import FusionConfig


def device() -> str:
    """Paddle's current device, as ``cpu`` or ``gpu:0``."""
    return str(paddle.device.get_device())


def settings(config: FusionConfig, plan: WorkspacePlan) -> dict[str, Any]:
    """What all ranks of a group must hold alike."""
    return {**config.to_dict(), "hidden_size": plan.hidden_size, "dtype": plan.dtype}


def rank_facts(backend: str, config: FusionConfig, plan: WorkspacePlan) -> dict[str, Any]:
    """Facts about this rank and the backend on it. ``"refusal"``: None, or why this rank can't take part."""
    facts: dict[str, Any] = {
        "pid": os.getpid(),
        "device": device(),
        "paddle": paddle.__version__,
        "settings": settings(config, plan),
    }
    try:
        facts.update(module_of(backend).probe(facts["device"]))
    except Exception as error:
        # A backend's probe must not raise; one that does must not take the engine down with it.
        facts["refusal"] = f"probing {backend} failed: {type(error).__name__}: {error}"
    return facts


def compare(facts: list[dict[str, Any]]) -> str | None:
    """The first setting or version in which two ranks differ, in words; None if all agree."""
    for rank, fact in enumerate(facts):
        for name, value in fact["settings"].items():
            first = facts[0]["settings"].get(name)
            if value != first:
                return f"{name} is {first} on rank 0 and {value} on rank {rank}; all ranks must have the same settings"
        if fact["paddle"] != facts[0]["paddle"]:
            return f"Paddle is {facts[0]['paddle']} on rank 0 and {fact['paddle']} on rank {rank}"
    return None
