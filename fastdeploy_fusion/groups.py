"""Groups of ranks over Paddle's process groups, with what Paddle 2.6 to 3.3 leaves to the caller wrapped once.

Ranks inside a group are in-group ranks (positions in the sorted list of global ranks) everywhere but here.
"""

import contextlib
import io
import os
import socket
import time
from collections.abc import Iterable
from typing import Any

import paddle
import paddle.distributed as dist
from paddle.base import core
from paddle.distributed import collective

from . import env
from .channel import Channel, Rendezvous
from .errors import FusionError, PeerLost
from .launch import wait_for_first_rank

_channels_made: dict[tuple[int, ...], int] = {}
"""How often a channel was made for a member list, so that the keys of successive ones differ, alike on all ranks."""


class RankGroup:
    """Some ranks that reduce together.

    Attributes:
        ranks: the global ranks, ascending; the identity of the group.
        rank: this process's position in ``ranks``.
        size: how many they are.
        timeout_s: how long an exchange waits for the slowest rank.
    """

    def __init__(self, ranks: tuple[int, ...], rank: int, paddle_group: Any, channel: Channel) -> None:
        self.ranks = ranks
        self.rank = rank
        self.size = len(ranks)
        self.paddle_group = paddle_group
        self.channel = channel
        self.timeout_s = env.seconds("FDFUSION_CALL_TIMEOUT_S")

    def all_gather_object(self, value: Any, what: str = "all_gather_object") -> list[Any]:
        """All ranks' values in rank order. JSON-able values and bytes; collective."""
        return self.channel.exchange(value, what, self.timeout_s)

    def broadcast_object(self, value: Any, root: int = 0) -> Any:
        """The value of in-group rank ``root``; collective."""
        return self.all_gather_object(value if self.rank == root else None, "broadcast_object")[root]

    def barrier(self) -> None:
        """Wait for all ranks of the group, on the CPU side only."""
        self.all_gather_object(None, "barrier")

    def all_reduce(self, tensor: Any, *, unrounded: bool = False) -> Any:
        """The sum over the group by Paddle's own collective, as a new tensor; float16 and bfloat16 on a CPU are summed
        in float32 (gloo's float16 sum is wrong in Paddle 3.3.1), and left so if ``unrounded``. Collective; equal shapes
        and dtypes on all ranks.

        Raises:
            FusionError: on a CPU, if the ranks bring different shapes or dtypes (gloo would abort the process).
        """
        if self.size == 1:
            return tensor
        on_cpu = tensor.place.is_cpu_place()
        if on_cpu:
            self.check_equal([list(tensor.shape), str(tensor.dtype)], "all_reduce")
        if tensor.size == 0:
            return tensor
        dtype = tensor.dtype
        widen = on_cpu and dtype in (paddle.float16, paddle.bfloat16)
        total = tensor.astype("float32") if widen else tensor.contiguous().clone()
        dist.all_reduce(total, group=self.paddle_group)
        return total.astype(dtype) if widen and not unrounded else total

    def ordered_sum(self, tensor: Any, *, unrounded: bool = False) -> Any:
        """As ``all_reduce``, but added in rank order in float32, whatever the shape: an element's bits depend on the
        ranks' elements alone. Every rank receives all shares. Collective."""
        first, *others = (share.astype("float32") for share in self.all_gather(tensor))
        for share in others:
            first = first + share
        return first if unrounded else first.astype(tensor.dtype)

    def all_gather(self, tensor: Any) -> list[Any]:
        """All ranks' tensors in rank order; equal shapes and dtypes. Collective."""
        if self.size == 1:
            return [tensor]
        if tensor.place.is_cpu_place():
            self.check_equal([list(tensor.shape), str(tensor.dtype)], "all_gather")
        if tensor.size == 0:  # gloo would end the process with SIGFPE
            return [tensor] * self.size
        gathered: list[Any] = []
        dist.all_gather(gathered, tensor.contiguous(), group=self.paddle_group)
        return gathered

    def check_equal(self, value: Any, what: str) -> None:
        """Raise on every rank alike if the ranks' values differ. Collective.

        Raises:
            FusionError: it names two ranks that differ, and their values.
        """
        values = self.all_gather_object(value, what)
        for rank, other in enumerate(values):
            if other != values[0]:
                names = self.channel.name_of
                raise FusionError(
                    f"{what}: {names(0)} brings {values[0]} and {names(rank)} brings {other}; all ranks of a group "
                    "must bring the same"
                )

    def fork(self) -> "RankGroup":
        """The same ranks with a CPU-side channel of their own, to be closed by the caller. What breaks there leaves
        this group's channel in step. Collective."""
        if self.size == 1:
            return self
        return _with_channel(self.ranks, self.rank, self.paddle_group)

    def close(self) -> None:
        """Hang up the CPU-side channel. Paddle's group stays, since others may use it. Idempotent, not collective."""
        self.channel.close()

    def __repr__(self) -> str:
        return f"RankGroup(ranks={list(self.ranks)}, rank={self.rank})"


def alone(rank: int) -> RankGroup:
    """The group of one global rank, which needs nobody."""
    return RankGroup((rank,), 0, None, Channel(0, (rank,), {}))


def init_world() -> RankGroup:
    """The group of all ranks of this launch (one rank where there was no launcher). Collective.

    It initialises Paddle's parallel environment if nobody did.
    """
    size = int(os.environ.get("PADDLE_TRAINERS_NUM", "1"))
    if size == 1:
        return alone(0)
    _init_parallel_env()
    return _with_channel(tuple(range(size)), dist.get_rank(), dist.get_group())


def _init_parallel_env() -> None:
    if not dist.is_initialized():
        wait_for_first_rank()
        choose_device()
        # Paddle writes its flags straight to sys.stderr here.
        with contextlib.redirect_stderr(io.StringIO()):
            dist.init_parallel_env()


def choose_device() -> None:
    """A GPU for each rank of a host and NCCL, or the CPU and gloo; only where no launcher or user has chosen.

    Paddle picks neither by itself when ranks are started without its launcher, and with gloo it moves to the CPU.
    """
    if "PADDLE_DISTRI_BACKEND" in os.environ or "FLAGS_selected_gpus" in os.environ:
        return
    num_gpus = paddle.device.cuda.device_count() if paddle.is_compiled_with_cuda() else 0
    if not num_gpus:
        os.environ["PADDLE_DISTRI_BACKEND"] = "gloo"
        return
    index = int(os.environ.get("PADDLE_TRAINER_ID", "0")) % num_gpus
    os.environ["FLAGS_selected_gpus"] = str(index)  # noqa: SIM112 (Paddle's name)
    paddle.device.set_device(f"gpu:{index}")


def new_group(ranks: Iterable[int]) -> RankGroup | None:
    """A sub-group, or None for a rank outside it. Every rank of the world must call it, in the same order.

    Raises:
        ValueError: ranks outside the world, or twice the same.
    """
    members = _check_members(ranks)
    _init_parallel_env()
    me = dist.get_rank()
    if len(members) == 1:
        return alone(me) if me in members else None
    paddle_group = _new_paddle_group(members, me)
    return _with_channel(members, members.index(me), paddle_group) if me in members else None


def from_paddle(group: Any) -> RankGroup:
    """Wrap a group that the caller made with ``paddle.distributed.new_group``. Collective over its members."""
    members = tuple(sorted(group.ranks))
    me = dist.get_rank()
    if me not in members:
        raise ValueError(f"global rank {me} is not in the group {list(members)}; only members can wrap it")
    if len(members) == 1:
        return alone(me)
    return _with_channel(members, members.index(me), group)


def _check_members(ranks: Iterable[int]) -> tuple[int, ...]:
    listed = list(ranks)
    members = tuple(sorted(set(listed)))
    world_size = int(os.environ.get("PADDLE_TRAINERS_NUM", "1"))
    if not members or len(members) != len(listed) or members[0] < 0 or members[-1] >= world_size:
        raise ValueError(f"ranks {listed} must be distinct and from 0 to {world_size - 1}")
    return members


def _with_channel(ranks: tuple[int, ...], rank: int, paddle_group: Any) -> RankGroup:
    made = _channels_made[ranks] = _channels_made.get(ranks, 0) + 1
    key = f"fdfusion/channel/{'-'.join(map(str, ranks))}/{made}"
    host = os.environ.get("PADDLE_CURRENT_ENDPOINT", "127.0.0.1:0").rpartition(":")[0] or "127.0.0.1"
    channel = Channel.connect(rank, ranks, host, store_rendezvous(key), env.seconds("FDFUSION_CALL_TIMEOUT_S"))
    return RankGroup(ranks, rank, paddle_group, channel)


def store_rendezvous(key: str) -> Rendezvous:
    """A rendezvous over the store that Paddle's parallel environment keeps."""
    store = collective._default_store
    if store is None:
        raise FusionError("Paddle's parallel environment is not initialised; call groups.init_world() first")

    def publish(value: str) -> None:
        store.set(key, value)
        store.add(key + "/ready", 1)

    def look_up(timeout_s: float) -> str:
        # get() would block for the store's own 15 minutes, so a counter says when there is something to get.
        deadline = time.monotonic() + timeout_s
        try:
            while store.add(key + "/ready", 0) < 1:
                if time.monotonic() > deadline:
                    raise PeerLost(f"the group's first rank did not publish {key} within {timeout_s:.0f} s")
                time.sleep(0.005)
            value = store.get(key)
        except PeerLost:
            raise
        except (ValueError, RuntimeError) as error:
            raise PeerLost(f"global rank 0's store is gone: {error}") from error
        return value.decode() if isinstance(value, bytes) else str(value)

    return Rendezvous(publish, look_up)


def _new_paddle_group(members: tuple[int, ...], me: int) -> Any:
    """``dist.new_group`` with a fresh store on gloo.

    Gloo's set-up in Paddle 2.6 to 3.3 writes addresses under keys that all groups share, so that a rank may connect to
    an earlier group's closed port. A store of its own per group removes the race; with NCCL nothing is wrong.
    """
    if os.environ.get("PADDLE_DISTRI_BACKEND", "") != "gloo" and paddle.is_compiled_with_cuda():
        return dist.new_group(list(members))
    key = (-1, *members)
    made = _channels_made[key] = _channels_made.get(key, 0) + 1
    rendezvous = store_rendezvous(f"fdfusion/store/{'-'.join(map(str, members))}/{made}")
    host = os.environ.get("PADDLE_CURRENT_ENDPOINT", "127.0.0.1:0").rpartition(":")[0] or "127.0.0.1"
    store = _group_store(members, me, host, rendezvous) if me in members else None
    shared = collective._default_store
    if store is not None:
        collective._set_default_store(store)
    try:
        group = dist.new_group(list(members))
    finally:
        collective._set_default_store(shared)
    group.fdfusion_store = store  # the group's connections need it as long as it lives
    return group


def _group_store(members: tuple[int, ...], me: int, host: str, rendezvous: Rendezvous) -> Any:
    if me == members[0]:
        with socket.socket() as probe:
            probe.bind((host, 0))
            port = probe.getsockname()[1]
        store = core.TCPStore(host, port, True, 1, 60)  # world size 1: it does not wait for others
        rendezvous.publish(f"{host} {port}")
        return store
    first_host, port_text = rendezvous.look_up(env.seconds("FDFUSION_CALL_TIMEOUT_S")).split()
    return core.TCPStore(first_host, int(port_text), False, 1, 60)
