"""The groups of one rank under a layout, made at start-up in one order on all ranks, with the fusion of each."""

import os
from typing import Any

from . import groups
from .config import FusionConfig, ParallelConfig
from .fusion import AllReduceFusion
from .groups import RankGroup
from .topology import Place, Topology, make_topology, why_not_fused


class Parallel:
    """What a model needs to know of the other ranks.

    Attributes:
        tp: sums of attention and dense MLPs. moe: sums of MoE layers. One object where both run over the same ranks.
        context, pipeline: this rank's groups; of one rank where the axis has size 1.
        place: this rank's position on each axis.
    """

    def __init__(
        self, config: ParallelConfig, topology: Topology, made: dict[tuple[int, ...], RankGroup], fusion: FusionConfig,
        hidden_size: int, dtype: str,
    ) -> None:  # fmt: skip
        rank = int(os.environ.get("PADDLE_TRAINER_ID", "0"))
        self.config = config
        self.topology = topology
        self.place: Place = topology.place(rank)
        self._groups = made
        self.context = made[topology.group_of("context", rank)]
        self.pipeline = made[topology.group_of("pipeline", rank)]
        self._fusions: dict[tuple[int, ...], AllReduceFusion] = {}
        for name in ("attention_tp", "moe"):
            members = topology.group_of(name, rank)
            if members not in self._fusions:
                self._fusions[members] = AllReduceFusion.open(
                    fusion, group=made[members], hidden_size=hidden_size, dtype=dtype
                )
        self.tp = self._fusions[topology.group_of("attention_tp", rank)]
        self.moe = self._fusions[topology.group_of("moe", rank)]

    @classmethod
    def open(
        cls, config: ParallelConfig, fusion: FusionConfig | None = None, *, hidden_size: int, dtype: str = "float32"
    ) -> "Parallel":
        """Make all groups of the layout and open their workspaces. Collective over the launch.

        Raises:
            ValueError: the launch has another number of ranks than the layout.
        """
        world_size = int(os.environ.get("PADDLE_TRAINERS_NUM", "1"))
        if world_size != config.world_size:
            raise ValueError(
                f"the layout has {config.world_size} ranks ({config}) and the launch {world_size}; start as many"
            )
        topology = make_topology(config)
        made = _make_groups(topology)
        fusion = fusion or FusionConfig()
        refusal = why_not_fused(config)
        return cls(config, topology, made, fusion if refusal is None else FusionConfig(), hidden_size, dtype)

    def close(self) -> None:
        """Give back all workspaces and channels. Idempotent."""
        for fusion in self._fusions.values():
            fusion.close()
        for group in self._groups.values():
            group.close()

    def __enter__(self) -> "Parallel":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


def _make_groups(topology: Topology) -> dict[tuple[int, ...], RankGroup]:
    """Every distinct group once, in one order on all ranks; this rank's own are returned."""
    world = groups.init_world()
    made = {world.ranks: world}
    for name in ("attention_tp", "moe", "context", "pipeline"):
        for members in getattr(topology, name):
            if members in made:
                continue
            group = groups.new_group(members)
            if group is not None:
                made[members] = group
            # Set-ups of overlapping groups must not overlap in time (paddle's gloo).
            world.barrier()
    return made
