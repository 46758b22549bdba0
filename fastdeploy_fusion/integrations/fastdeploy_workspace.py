"""The workspace of one FastDeploy group, under the name that FastDeploy's module gives to it."""

from typing import Any

import paddle.distributed as dist

from .. import groups
from ..config import FusionConfig
from ..errors import FusionError
from ..fusion import AllReduceFusion
from ..groups import RankGroup


class FlashInferWorkspaceManager:
    """One group's workspace.

    Attributes:
        initialized: whether there is a fused backend for the group; fusion: what executes calls either way.
        world_size, rank: of the group; ``rank`` is the in-group rank.
        workspace_tensor, ipc_handles: always None; FastDeploy's module has them.
    """

    workspace_tensor = ipc_handles = None

    def __init__(self) -> None:
        self.fusion: AllReduceFusion | None = None
        self.world_size: int | None = None
        self.rank: int | None = None
        self.initialized = False

    def initialize(
        self,
        world_size: int,
        rank: int,
        max_token_num: int | None,
        hidden_dim: int,
        group: Any = None,
        use_fp32_lamport: bool = False,
        *,
        dtype: str | None = None,
        config: FusionConfig | None = None,
    ) -> None:
        """Open the workspace over exactly ``group``. Collective over its members, at start-up; once.

        Args:
            world_size: the group's size. rank: ignored, as callers pass the global one; the group knows the rank.
            max_token_num: more tokens take the plain path; None: measured limits for the device and the shape.
            group: Paddle's group; None: all ranks, and then ``world_size`` must be theirs.
            use_fp32_lamport: float32 activations, where ``dtype`` does not say it.

        Raises:
            ValueError: ``world_size`` is not the group's size.
            WorkspaceError: a CUDA graph is being captured.
        """
        if self.fusion is not None:
            return
        members = rank_group(group, world_size)
        config = config or FusionConfig(enabled=True, num_max_tokens=max_token_num)
        dtype = dtype or ("float32" if use_fp32_lamport else "bfloat16")
        try:
            self.fusion = AllReduceFusion.open(config, group=members, hidden_size=hidden_dim, dtype=dtype)
        except BaseException:
            members.close()
            raise
        self.world_size, self.rank = members.size, members.rank
        self.initialized = config.enabled and members.size > 1 and self.fusion.state.unavailable is None

    @property
    def is_open(self) -> bool:
        """Whether it holds a workspace, or the agreement that there is none, until ``cleanup``."""
        return self.world_size is not None

    @property
    def opened(self) -> AllReduceFusion:
        """``fusion``; raises FusionError before ``initialize`` and after ``cleanup``."""
        if self.fusion is None:
            raise FusionError("this workspace manager is not initialised; call initialize() on all ranks of the group")
        return self.fusion

    def cleanup(self) -> None:
        """Give the workspace back. Idempotent; ``initialize`` may follow."""
        fusion, self.fusion = self.fusion, None
        self.initialized, self.world_size, self.rank = False, None, None
        if fusion is not None:
            fusion.close()
            fusion.group.close()


def rank_group(group: Any, world_size: int) -> RankGroup:
    """The group of the library for Paddle's. Collective over the members.

    Raises:
        ValueError: it has another size than ``world_size``.
    """
    if world_size <= 1:
        return groups.alone(0)
    size = len(group.ranks) if group is not None else dist.get_world_size()
    if size != world_size:
        which = "tp_group" if group is not None else "tp_group is None, and the world"
        raise ValueError(f"{which} has {size} ranks, but tensor_parallel_size is {world_size}; pass the group of these")
    return groups.from_paddle(group) if group is not None else groups.init_world()
