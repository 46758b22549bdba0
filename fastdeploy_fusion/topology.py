"""From sizes to groups of ranks: one pure function, so that every rank knows every group.

Rank order, tensor-parallel ranks next to each other (as in FastDeploy, whose tensor-parallel group of a data-parallel
rank is ``[dp * tp, (dp + 1) * tp)``, and SGLang, whose global rank is ``pp * tp_size + tp``):

    rank = ((data * PP + stage) * CP + context) * TP + tensor

Experts follow SGLang's MoE groups: within a tensor-parallel group, rank ``tensor`` holds part ``tensor // MoE_TP`` of
the experts and shard ``tensor % MoE_TP`` of each of them (SGLang: ``moe_ep_rank``, ``moe_tp_rank``).

The sum of a MoE layer runs over the whole tensor-parallel group whatever the split of experts, because all its ranks
hold the same tokens and each expert shard lies on exactly one of them. SGLang reduces first over MoE-EP and then over
MoE-TP, and had to forbid fusion there (two groups, one kernel); the product group needs one sum.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from .config import ParallelConfig


@dataclass(frozen=True)
class Place:
    """Where one global rank stands on each axis."""

    data: int
    stage: int
    context: int
    tensor: int
    expert_part: int
    expert_shard: int


@dataclass(frozen=True)
class Topology:
    """All groups of a layout; each is a list of ascending global ranks, and every rank is in one group of each name.

    attention_tp: share a layer's matrices and hold the same tokens; the sums of attention and dense MLPs run here.
    moe: the sum of a MoE layer runs here.
    expert_parts: hold the same experts (shards of them); nothing is summed here.
    context: hold the same shards and different parts of a prompt; keys and values are gathered here.
    pipeline: the stages that one token goes through, in order.
    replica: one copy of the model; it runs the same prompts. Nothing is summed here.
    """

    config: ParallelConfig
    attention_tp: tuple[tuple[int, ...], ...]
    moe: tuple[tuple[int, ...], ...]
    expert_parts: tuple[tuple[int, ...], ...]
    context: tuple[tuple[int, ...], ...]
    pipeline: tuple[tuple[int, ...], ...]
    replica: tuple[tuple[int, ...], ...]

    def place(self, rank: int) -> Place:
        """Of a global rank."""
        return _place(self.config, rank)

    def group_of(self, name: str, rank: int) -> tuple[int, ...]:
        """The group called ``name`` that a global rank is in; its in-group rank is its position there."""
        for members in getattr(self, name):
            if rank in members:
                return members
        raise ValueError(f"rank {rank} is not in this layout of {self.config.world_size} ranks")

    @property
    def boundaries(self) -> tuple[tuple[int, ...], ...]:
        """Neighbours in each pipeline, in pairs: a transfer from stage to stage is theirs alone."""
        return tuple(pair for stages in self.pipeline for pair in pairwise(stages))

    @property
    def reduced_groups(self) -> tuple[tuple[int, ...], ...]:
        """The distinct groups of more than one rank that sums run over, in the order in which all ranks make them."""
        return tuple(dict.fromkeys(g for g in (*self.attention_tp, *self.moe) if len(g) > 1))

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def lines(self) -> Iterator[str]:
        """The layout as a person reads it."""
        c = self.config
        yield (
            f"{c.world_size} ranks = data {c.data_parallel_size} x stages {c.pipeline_parallel_size} x context "
            f"{c.context_parallel_size} x tensor {c.tensor_parallel_size} (experts: {c.expert_parallel_size} parts x "
            f"{c.moe_tensor_parallel_size} shards)"
        )
        for name in ("attention_tp", "moe", "expert_parts", "context", "pipeline", "replica"):
            yield f"{name:<13} {' '.join('[' + ','.join(map(str, g)) + ']' for g in getattr(self, name))}"


def make_topology(config: ParallelConfig) -> Topology:
    """Pure: equal configs give equal groups on every rank."""
    ranks = range(config.world_size)

    def grouped(*axes: str) -> tuple[tuple[int, ...], ...]:
        """Ranks that agree on all of ``axes``."""
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank in ranks:
            place = _place(config, rank)
            groups.setdefault(tuple(getattr(place, axis) for axis in axes), []).append(rank)
        return tuple(tuple(members) for members in groups.values())

    tensor_groups = grouped("data", "stage", "context")
    return Topology(
        config,
        attention_tp=_attention_groups(config, tensor_groups),
        moe=tensor_groups,
        expert_parts=grouped("data", "stage", "context", "expert_part"),
        context=grouped("data", "stage", "tensor"),
        pipeline=grouped("data", "context", "tensor"),
        replica=grouped("data"),
    )


def _attention_groups(
    config: ParallelConfig, tensor_groups: tuple[tuple[int, ...], ...]
) -> tuple[tuple[int, ...], ...]:
    # With data-parallel attention every rank attends to tokens of its own, so nothing is owed after attention.
    if not config.enable_dp_attention:
        return tensor_groups
    return tuple((rank,) for members in tensor_groups for rank in members)


def why_not_fused(config: ParallelConfig) -> str | None:
    """Why no sum of this layout may wait for a norm; None if it may. Equal on all ranks."""
    if config.enable_dp_attention and config.tensor_parallel_size > 1:
        return (
            "data-parallel attention: the ranks of a tensor-parallel group hold different tokens, so there is no sum "
            "after attention, and the one after the experts is followed by a scatter, not by a norm of the same rows"
        )
    return None


def _place(config: ParallelConfig, rank: int) -> Place:
    if not 0 <= rank < config.world_size:
        raise ValueError(f"rank {rank} is outside this layout of {config.world_size} ranks")
    rest, tensor = divmod(rank, config.tensor_parallel_size)
    rest, context = divmod(rest, config.context_parallel_size)
    data, stage = divmod(rest, config.pipeline_parallel_size)
    part, shard = divmod(tensor, config.moe_tensor_parallel_size)
    return Place(data, stage, context, tensor, part, shard)
