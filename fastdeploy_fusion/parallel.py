"""The groups of one rank under a layout, made at start-up in one order on all ranks, with the fusion of each."""

import contextlib
import dataclasses
import logging
import os
from collections import Counter
from typing import Any

from . import groups
from .config import FusionConfig, ParallelConfig
from .fusion import AllReduceFusion
from .groups import RankGroup
from .topology import Place, Topology, make_topology, why_not_fused

log = logging.getLogger(__name__)


class Parallel:
    """What a model needs to know of the other ranks.

    Attributes:
        config, place: the layout, and this rank's position on each of its axes.
        tp: sums of attention and dense MLPs. moe: sums of MoE layers. One object where both run over the same ranks.
        context, pipeline: this rank's groups; of one rank where the axis has size 1.
        before, after: this rank and its neighbour in the pipeline on either side; None at the ends.
        replica: all ranks of this copy of the model; they run the same prompts.
        world: all ranks of the launch, where ``open`` made the layout; else the replica.
    """

    def __init__(
        self,
        config: ParallelConfig,
        place: Place,
        *,
        tp: AllReduceFusion,
        moe: AllReduceFusion,
        context: RankGroup,
        pipeline: RankGroup,
        replica: RankGroup,
        before: RankGroup | None = None,
        after: RankGroup | None = None,
    ) -> None:
        """The caller closes what it gives; ``open`` makes all of it, and an object that closes it."""
        self.config, self.place = config, place
        self.tp, self.moe = tp, moe
        self.context, self.pipeline, self.replica = context, pipeline, replica
        self.before, self.after = before, after
        self.world = replica
        self._owned = contextlib.ExitStack()

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
        rank = int(os.environ.get("PADDLE_TRAINER_ID", "0"))
        settings, refusal = fusion or FusionConfig(), why_not_fused(config)
        if refusal is not None:
            settings = dataclasses.replace(settings, enabled=False, auto=False, decided_by=refusal)
        with contextlib.ExitStack() as owned:
            world = groups.init_world()
            made = _make_groups(world, topology, owned)
            fusions: dict[tuple[int, ...], AllReduceFusion] = {}
            for name in ("attention_tp", "moe"):
                members = topology.group_of(name, rank)
                if members not in fusions:
                    opened = AllReduceFusion.open(settings, group=made[members], hidden_size=hidden_size, dtype=dtype)
                    fusions[members] = owned.enter_context(opened)
            parallel = cls(
                config,
                topology.place(rank),
                tp=fusions[topology.group_of("attention_tp", rank)],
                moe=fusions[topology.group_of("moe", rank)],
                context=made[topology.group_of("context", rank)],
                pipeline=made[topology.group_of("pipeline", rank)],
                replica=made[topology.group_of("replica", rank)],
                before=next((made[pair] for pair in topology.boundaries if pair[1] == rank), None),
                after=next((made[pair] for pair in topology.boundaries if pair[0] == rank), None),
            )
            parallel.world = world
            if rank == 0:
                log.info("all-reduce fusion is %s", parallel.tp.status())
            parallel._owned = owned.pop_all()
        return parallel

    @classmethod
    def around(cls, tp: AllReduceFusion) -> "Parallel":
        """Tensor parallelism alone, over the ranks of an open fusion, which stays the caller's to close. Local."""
        config = ParallelConfig(tensor_parallel_size=tp.world_size)
        me = groups.alone(tp.group.ranks[tp.rank])
        place = make_topology(config).place(tp.rank)
        return cls(config, place, tp=tp, moe=tp, context=me, pipeline=me, replica=tp.group)

    @property
    def counters(self) -> Counter[tuple[str, str, str]]:
        """``(op, path, reason) -> calls`` of all sums of this rank."""
        return self.tp.counters if self.moe is self.tp else self.tp.counters + self.moe.counters

    @property
    def site_counters(self) -> Counter[tuple[str, str, str, str]]:
        """``(site, op, path, reason) -> calls`` of all sums of this rank."""
        return self.tp.site_counters if self.moe is self.tp else self.tp.site_counters + self.moe.site_counters

    def from_last_stage(self, value: Any) -> Any:
        """The JSON-able value of the last stage's first rank, on all ranks of the replica; collective over it.

        Under tensor parallelism alone each rank keeps its own: they are the same bytes by construction.
        """
        c = self.config
        if c.pipeline_parallel_size == c.context_parallel_size == 1:
            return value
        return self.replica.broadcast_object(value, self.replica.size - self.replica.size // c.pipeline_parallel_size)

    def close(self) -> None:
        """Give back all workspaces and channels that ``open`` made. Idempotent."""
        self._owned.close()

    def __enter__(self) -> "Parallel":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


def as_parallel(ranks: Parallel | AllReduceFusion) -> Parallel:
    """A layout as it is; an open fusion as a tensor-parallel layout."""
    return ranks if isinstance(ranks, Parallel) else Parallel.around(ranks)


def _make_groups(world: RankGroup, topology: Topology, owned: contextlib.ExitStack) -> dict[tuple[int, ...], RankGroup]:
    """Every distinct group once, in one order on all ranks; this rank's own are returned, to be closed by ``owned``."""
    owned.callback(world.close)
    made = {world.ranks: world}
    done = {world.ranks}
    t = topology
    for members in (*t.attention_tp, *t.moe, *t.context, *t.pipeline, *t.boundaries, *t.replica):
        if members in done:
            continue
        done.add(members)
        group = groups.new_group(members)
        if group is not None:
            made[members] = group
            owned.callback(group.close)
        # Set-ups of overlapping groups must not overlap in time (paddle's gloo).
        world.barrier()
    return made
