"""Pipeline parallelism: consecutive layers on consecutive stages, and what crosses from one stage to the next."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import paddle
import paddle.distributed as dist

from ..errors import PeerLost
from ..partial import PartialSum
from . import ops

if TYPE_CHECKING:
    from ..groups import RankGroup


def stage_layers(num_layers: int, stage: int, num_stages: int) -> range:
    """The layers of one stage; sizes differ by at most one, and the later stages have the larger share, for the first
    has the embedding to do.

    Raises:
        ValueError: fewer layers than stages.
    """
    if num_layers < num_stages:
        raise ValueError(
            f"pipeline_parallel_size {num_stages} is more than the model's {num_layers} layers; "
            f"choose at most {num_layers}"
        )
    return range(stage * num_layers // num_stages, (stage + 1) * num_layers // num_stages)


class PipelineStage:
    """This rank's stage. ``layers``: the numbers of its layers. ``group``: one rank of every stage, in order.

    What crosses a boundary is one tensor ``[num_tokens, hidden_size]``: the residual stream with every sum completed.
    """

    def __init__(self, group: "RankGroup", num_layers: int) -> None:
        self.group = group
        self.layers = stage_layers(num_layers, group.rank, group.size)
        self.is_first = group.rank == 0
        self.is_last = group.rank == group.size - 1

    def send(self, hidden: Any, residual: Any) -> None:
        """Hand ``hidden + residual`` to the next stage; a sum that ``hidden`` still owes is completed first."""
        if isinstance(hidden, PartialSum):
            hidden = hidden.complete()
        stream = ops.add(hidden, residual)
        self._with(self.group.rank + 1, lambda peer: dist.send(stream, dst=peer, group=self.group.paddle_group))

    def receive(self, shape: list[int], dtype: str) -> Any:
        """The residual stream of the stage before."""
        stream = paddle.empty(shape, dtype=dtype)
        self._with(self.group.rank - 1, lambda peer: dist.recv(stream, src=peer, group=self.group.paddle_group))
        return stream

    def _with(self, rank: int, transfer: Callable[[int], Any]) -> None:
        try:
            transfer(self.group.ranks[rank])
        except RuntimeError as error:
            raise PeerLost(f"{self.group.channel.name_of(rank)} was lost at the stage boundary: {error}") from error


def share_last(group: "RankGroup", tensor: Any, shape: list[int], dtype: str) -> Any:
    """The last stage's ``tensor`` on all stages, where the others give None. Collective over the pipeline group."""
    if group.size == 1:
        return tensor
    shared = paddle.empty(shape, dtype=dtype) if tensor is None else tensor.contiguous()
    dist.broadcast(shared, src=group.ranks[-1], group=group.paddle_group)
    return shared
