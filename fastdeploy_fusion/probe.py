"""Facts of this rank for start-up, gathered and compared before anything is allocated. Nothing here raises."""

import dataclasses
import os
from typing import Any

import paddle

from . import tuned
from .backends import WorkspacePlan, module_of
from .config import FusionConfig

_TIMING_VERSIONS = {"shm": "2"}
"""Versions of our own backends for measured limits: raised when a change moves the crossover."""


def device() -> str:
    """Paddle's current device, as ``cpu`` or ``gpu:0``."""
    return str(paddle.device.get_device())


def settings(config: FusionConfig, plan: WorkspacePlan) -> dict[str, Any]:
    """What all ranks of a group must hold alike."""
    held_alike = {field.name: getattr(config, field.name) for field in dataclasses.fields(config) if field.compare}
    return {**held_alike, "hidden_size": plan.hidden_size, "dtype": plan.dtype}


def device_name(device: str, facts: dict[str, Any]) -> str:
    """The processor or GPU that measured limits hold for: ``AMD EPYC 9654, 8 cores`` or ``NVIDIA H200``."""
    if device.startswith("gpu"):
        name = str(paddle.device.cuda.get_device_name(int(device.partition(":")[2] or 0)))
        return f"{name}, SM{facts['sm']}" if "sm" in facts else name
    with open("/proc/cpuinfo") as file:
        models = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    return f"{models[0] if models else 'unknown processor'}, {os.cpu_count()} cores"


def tuning_conditions(backend: str, facts: dict[str, Any]) -> dict[str, str]:
    """What a measured limit holds for on this rank."""
    version = f"{facts['flashinfer']} ({facts['way']})" if "flashinfer" in facts else _TIMING_VERSIONS.get(backend, "1")
    return tuned.conditions(device_name(facts["device"], facts), backend, version, facts["paddle"])


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
    try:
        facts["tuned"] = tuned.rank_view(tuning_conditions(backend, facts))
    except Exception as error:
        facts["tuned"] = tuned.no_view(f"this machine can't be identified: {type(error).__name__}: {error}")
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
