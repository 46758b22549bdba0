"""A plan as JSON-able values: a model's sums (``models.outline``), judged by ``policy.decide`` in forecast states."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .. import models
from ..backends import WorkspacePlan
from ..config import FusionConfig, ParallelConfig
from ..forecast import Device, Forecast, forecast, named_gpu, this_machine
from ..models import outline
from ..policy import ITEMSIZE, Op, Request, decide
from ..policy import Path as Route
from ..topology import make_topology, why_not_fused

Group = tuple[int, ...]


def make(
    config_file: Path,
    layout: ParallelConfig,
    fusion: FusionConfig,
    *,
    gpu: str | None,
    gpus_per_host: int,
    dtype: str,
    token_counts: Sequence[int],
) -> dict[str, Any]:
    """The plan of one copy of the model. ``token_counts``: rows that a rank holds in one forward.

    Raises:
        ValueError: the model does not run under the layout. CheckpointError: config.json can't be used.
    """
    config = models.load_config(config_file.parent) if config_file.name == "config.json" else _read(config_file)
    fusion = dataclasses.replace(fusion, enabled=fusion.enabled and why_not_fused(layout) is None)
    shape = WorkspacePlan(layout.tensor_parallel_size, config.hidden_size, dtype, 1)
    device = named_gpu(gpu, gpus_per_host) if gpu is not None else this_machine(fusion, shape)
    stages = _stages(config, layout, fusion, dtype)
    groups = {step.group for steps in stages for step in outline.sums(steps)}
    forecasts = {group: _forecast(fusion, shape, device, group) for group in sorted(groups)}
    sites = [
        _site(step, stage, config.hidden_size, dtype, forecasts, fusion, token_counts)
        for stage, steps in enumerate(stages)
        for step in outline.sums(steps)
    ]
    return {
        "architecture": config.architecture,
        "hidden_size": config.hidden_size,
        "num_layers": config.num_hidden_layers,
        "dtype": dtype,
        "enabled": fusion.enabled,
        "layout": dataclasses.asdict(layout),
        "num_ranks": layout.world_size,
        "device": {"name": device.name, "sm": device.sm},
        "token_counts": list(token_counts),
        "groups": [_group(group, layout, forecasts[group]) for group in forecasts],
        "sites": sites,
        "totals": {str(n): _totals(sites, n) for n in token_counts},
        "workspace_bytes_a_rank": max(map(sum, _bytes_by_rank(forecasts).values()), default=0),
        "steps": [[_step(step) for step in steps] for steps in stages],
    }


def _read(config_file: Path) -> models.ModelConfig:
    values = models.hf_json.read_json(config_file)
    models.registry.check_architecture(models.hf_json.architecture_of(values))
    return models.ModelConfig.from_hf(values)


def _stages(
    config: models.ModelConfig, layout: ParallelConfig, fusion: FusionConfig, dtype: str
) -> list[list[outline.Step]]:
    """The steps of each pipeline stage, on its first rank of the first copy."""
    topology = make_topology(layout)
    first = topology.pipeline[0]
    return [outline.trace(config, layout, rank, fusion, dtype) for rank in first]


def _forecast(fusion: FusionConfig, shape: WorkspacePlan, device: Device, group: Group) -> Forecast:
    per_host = device.ranks_per_host
    # Ranks of a group need not begin a host: what counts is on which hosts its members are.
    hosts = None if per_host is None else len({rank // per_host for rank in group})
    within = len(group) if hosts in (None, 1) else -(-len(group) // (hosts or 1))
    plan = dataclasses.replace(shape, world_size=len(group))
    return forecast(fusion, plan, dataclasses.replace(device, ranks_per_host=within))


def _site(
    step: outline.Step,
    stage: int,
    hidden_size: int,
    dtype: str,
    forecasts: dict[Group, Forecast],
    fusion: FusionConfig,
    token_counts: Sequence[int],
) -> dict[str, Any]:
    assert step.op is not None
    state = forecasts[step.group].state
    paths = {}
    for n in token_counts:
        decision = decide(Request(step.op, (n, hidden_size), dtype, dtype), state, fusion)
        paths[str(n)] = {"path": decision.path.value, "reason": decision.reason.value, "detail": decision.detail}
    return {
        "stage": stage,
        "layer": _layer_of(step.site or ""),
        "site": step.site,
        "op": step.op.value,
        "consumer": step.name if step.op is Op.ADD_RMS_NORM else None,
        "ranks": list(step.group),
        "bytes_a_token": hidden_size * ITEMSIZE[dtype],
        "paths": paths,
    }


def _layer_of(site: str) -> int | None:
    """The first number among a prefix's segments: ``model.layers.3.mlp.down_proj`` -> 3."""
    return next((int(part) for part in site.split(".") if part.isdigit()), None)


def _group(group: Group, layout: ParallelConfig, made: Forecast) -> dict[str, Any]:
    alike = [g for g in make_topology(layout).moe if len(g) == len(group)]
    return {
        "ranks": list(group),
        "groups_like_it": max(1, len(alike)) // layout.pipeline_parallel_size if len(group) > 1 else 1,
        "backend": made.state.backend,
        "unavailable": made.state.unavailable,
        "num_max_tokens": made.state.num_max_tokens,
        "all_reduce_max_tokens": made.state.limit(Op.ALL_REDUCE),
        "workspace_bytes_a_rank": made.workspace_bytes,
    }


def _bytes_by_rank(forecasts: dict[Group, Forecast]) -> dict[int, list[int]]:
    taken: dict[int, list[int]] = {}
    for group, made in forecasts.items():
        for rank in group:
            taken.setdefault(rank, []).append(made.workspace_bytes)
    return taken


def _totals(sites: Sequence[dict[str, Any]], num_tokens: int) -> dict[str, int]:
    """Sums of one forward by path, and the bytes of their operands on one rank of each stage."""
    paths = [site["paths"][str(num_tokens)]["path"] for site in sites]
    return {
        "sums": len(sites),
        "fused": paths.count(Route.FUSED.value),
        "fused_with_norm": sum(
            path == Route.FUSED.value and site["op"] == Op.ADD_RMS_NORM.value
            for path, site in zip(paths, sites, strict=True)
        ),
        "summed": paths.count(Route.SUMMED.value),
        "plain": paths.count(Route.PLAIN.value),
        "bytes": sum(site["bytes_a_token"] for site in sites) * num_tokens,
    }


def _step(step: outline.Step) -> dict[str, Any]:
    return {**dataclasses.asdict(step), "op": step.op.value if step.op else None, "group": list(step.group)}
