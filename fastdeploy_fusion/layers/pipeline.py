"""Pipeline parallelism: consecutive layers on consecutive stages, and what crosses from one stage to the next."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import paddle
import paddle.distributed as dist

from ..errors import FusionError, PeerLost
from ..partial import PartialSum
from . import ops

if TYPE_CHECKING:
    from ..groups import RankGroup
    from ..parallel import Parallel


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
    """This rank's stage. ``layers``: the numbers of its layers.

    What crosses a boundary is one tensor ``[num_tokens, hidden_size]``: the residual stream with every sum completed.
    """

    def __init__(self, parallel: "Parallel", num_layers: int) -> None:
        self.before, self.after = parallel.before, parallel.after
        self.layers = stage_layers(num_layers, parallel.pipeline.rank, parallel.pipeline.size)
        self.is_first, self.is_last = self.before is None, self.after is None

    def send(self, hidden: Any, residual: Any) -> None:
        """Hand ``hidden + residual`` to the next stage; a sum that ``hidden`` still owes is completed first."""
        if isinstance(hidden, PartialSum):
            hidden = hidden.complete()
        stream = ops.add(hidden, residual)
        _transfer(self.after, 1, lambda peer, group: dist.send(stream, dst=peer, group=group))

    def receive(self, shape: list[int], dtype: str) -> Any:
        """The residual stream of the stage before."""
        stream = paddle.empty(shape, dtype=dtype)
        _transfer(self.before, 0, lambda peer, group: dist.recv(stream, src=peer, group=group))
        return stream


def _transfer(pair: "RankGroup | None", peer: int, transfer: Callable[[int, Any], Any]) -> None:
    """Within a pair, because gloo numbers a group's transfers on each rank, and all its ranks must count alike."""
    if pair is None:
        raise FusionError("no stage lies beyond this boundary; the last stage sends and the first receives nothing")
    if paddle.get_device().startswith("cpu"):
        pair.channel.exchange(None, "stage boundary", pair.timeout_s)  # gloo would wait for 30 s, whatever the limit
    try:
        transfer(pair.ranks[peer], pair.paddle_group)
    except RuntimeError as error:
        raise PeerLost(f"{pair.channel.name_of(peer)} was lost at the stage boundary: {error}") from error


def share_last(group: "RankGroup", tensor: Any, shape: list[int], dtype: str) -> Any:
    """The last stage's ``tensor`` on all stages, where the others give None. Collective over the pipeline group."""
    if group.size == 1:
        return tensor
    if paddle.get_device().startswith("cpu"):
        group.check_equal(shape, "sharing the last stage's tensor")  # it names a rank that is lost; gloo doesn't
    shared = paddle.empty(shape, dtype=dtype) if tensor is None else tensor.contiguous()
    dist.broadcast(shared, src=group.ranks[-1], group=group.paddle_group)
    return shared
