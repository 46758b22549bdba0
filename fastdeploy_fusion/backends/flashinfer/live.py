"""The live backend of one group on one GPU, and how it is made."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np

from ...errors import PeerLost, WorkspaceError
from ...host_values import from_numpy
from . import bound, driver, paddle_side
from .api import Workspace
from .comm import Communicator
from .launchers import Direct, Options, Site, Slots
from .public_call import Public

_log = logging.getLogger(__name__)


class TrtllmBackend:
    """FlashInfer's kernels over one workspace. Not for several threads at once; every rank makes the same calls in the
    same order, as for any collective.

    route: how kernels are launched ("direct", "slots" or "public"), `route_reason` why not a faster way.
    """

    name = "trtllm"
    timeout_s = 30.0  # of the Protocol; a kernel waits for its peers on the GPU, where no clock stops it
    deterministic = False  # equal inputs give equal bits, but a row's bits depend on how many rows go with it

    def __init__(self, way: Any, workspace: Workspace, communicator: Communicator, site: Site) -> None:
        self._way = way
        self._workspace: Workspace | None = workspace
        self._communicator = communicator
        self.site = site
        self.options = Options()
        self.route_reason = ""
        self._read_stream = paddle_side.stream_reader(site.device_id)
        self.takes_weight_bias = bool(way.api.has_weight_bias)
        self._empty = paddle_side.empty_maker(site.hidden_size, site.dtype)
        self._binding: bound.Binding | None = None
        self._launcher: Any = self.make_launcher("public")

    @property
    def route(self) -> str:
        return str(self._launcher.name)

    def make_launcher(self, route: str, options: Options | None = None) -> Any:
        """A launcher over this workspace: direct, slots or public. Raises where the route is not there."""
        options = options or self.options
        workspace = self._workspace
        if workspace is None:
            raise WorkspaceError("the trtllm workspace is closed; open a new one")
        if route == "public":
            return Public(self._way, workspace, self.site, options, self._read_stream)
        if self._binding is None:
            self._binding = bound.bind(self._way.comm.trtllm_ar)
        if route == "direct":
            return Direct(self._binding, self.site, options, workspace.table)
        return Slots(self._binding, self.site, options, int(workspace.table.data_ptr()), self._read_stream)

    def use(self, route: str, options: Options = Options()) -> None:  # noqa: B008 (frozen)
        """Launch by another route or with other options from now on; for tests and tools. Alike on all ranks."""
        self._launcher, self.options = self.make_launcher(route, options), options

    def choose_route(self) -> None:
        """The fastest route whose results equal the public call's, voted so that all ranks go one way.

        It also loads every kernel that the rule can choose later, which could not be done during a graph capture.
        """
        shapes = self._trial_shapes()
        self.use("public")
        expected = [_trial(self, tokens) for tokens in shapes]
        for route in ("direct", "slots") if paddle_side.is_exchangeable() else ("slots",):
            try:
                self.use(route)
                failure = ""
            except Exception as error:  # whatever FlashInfer or the FFI did: the public call is there
                failure = f"{route}: {type(error).__name__}: {error}"
            if not self._agree(failure):
                continue
            same = [_trial(self, tokens) for tokens in shapes] == expected
            if self._agree("" if same else f"{route}: differs from the public call"):
                return
        self.use("public")
        _log.warning("FlashInfer's kernels are launched by its public call: %s", self.route_reason)

    def _trial_shapes(self) -> list[int]:
        """Numbers of tokens that reach each strategy of the rule."""
        site = self.site
        largest = site.num_max_tokens
        return [min(3, largest)] + [largest] * (not site.oneshot(largest, self.options))

    def _agree(self, failure: str) -> bool:
        failures = [text for text in self._communicator.allgather(failure) if text]
        self.route_reason = "; ".join(filter(None, [self.route_reason, *failures[:1]]))
        return not failures

    def add_rms_norm(
        self, partial: Any, residual: Any, weight: Any, eps: float, weight_bias: float = 0.0
    ) -> tuple[Any, Any]:
        """(rms_norm(sum + residual) * (weight + weight_bias), sum + residual), both new tensors of the plan's dtype.

        partial, residual: [tokens, hidden], contiguous; weight: [hidden]; of the plan's dtype, on this GPU. Launches on
        Paddle's current stream. weight_bias: 0 where `takes_weight_bias` is False (the policy sees to it).
        """
        assert not weight_bias or self.takes_weight_bias
        at = partial.data_ptr(), residual.data_ptr(), weight.data_ptr()
        if (at[0] | at[1] | at[2]) & 15 or not weight.is_contiguous():
            partial, residual, weight = _aligned(partial), _aligned(residual), _aligned(weight)
            at = partial.data_ptr(), residual.data_ptr(), weight.data_ptr()
        tokens = partial.shape[0]
        norm_out, residual_out = self._empty(tokens), self._empty(tokens)
        self._launcher.norm(tokens, partial, residual, weight, at, eps, weight_bias, norm_out, residual_out)
        return norm_out, residual_out

    def all_reduce(self, partial: Any) -> Any:
        """The sum over the group, a new tensor. partial: [tokens, hidden], contiguous, of the plan's dtype."""
        tokens = partial.shape[0]
        partial = _aligned(partial)
        out = self._empty(tokens)
        self._launcher.reduce(tokens, partial, out)
        return out

    def held_bytes(self) -> int:
        """Physical bytes of the workspace's buffers on this GPU as FlashInfer counts them; 0 where it does not."""
        memories = getattr(getattr(self._workspace, "unified", None), "mem_handles", None) or []
        return sum(int(memory.allocation_size) for memory in memories)

    def close(self) -> None:
        """Wait for the GPU and give all memory back. Idempotent; collective unless a peer is gone."""
        workspace, self._workspace = self._workspace, None
        if workspace is None:
            return
        self._launcher = _Closed()
        driver.make_current(self.site.device_id)
        driver.synchronize()
        try:
            self._communicator.barrier()
            alive = True
        except PeerLost:
            alive = False
        workspace.close(alive)
        self._communicator.close()


class _Closed:
    name = "closed"

    def _refuse(self, *_: Any) -> None:
        raise WorkspaceError("the trtllm workspace is closed; open a new one")

    norm = reduce = _refuse


def _aligned(tensor: Any) -> Any:
    """The tensor, or a copy of it where the kernel's 16-byte accesses need one."""
    if not tensor.is_contiguous():
        tensor = tensor.contiguous()
    return tensor.clone() if tensor.data_ptr() & 15 else tensor


def _trial(backend: TrtllmBackend, tokens: int) -> list[bytes]:
    """The results' bits of one fused and one plain call, on data that differs from rank to rank."""
    site = backend.site
    noise, common = np.random.default_rng(site.rank), np.random.default_rng(99)
    shape = (tokens, site.hidden_size)
    partial = from_numpy(noise.standard_normal(shape, "float32"), site.dtype)
    residual = from_numpy(common.standard_normal(shape, "float32"), site.dtype)
    weight = from_numpy(common.standard_normal(site.hidden_size, "float32"), site.dtype)
    results = (*backend.add_rms_norm(partial, residual, weight, 1e-6), backend.all_reduce(partial))
    return [result.numpy().tobytes() for result in results]


def create(way: Any, group: Any, plan: Any) -> TrtllmBackend:
    """Make the workspace and choose the route. Collective over the group: all ranks get a backend, or all raise."""
    communicator = Communicator(group)
    made: list[Workspace] = []
    try:
        backend = _create(way, communicator, plan, made)
    except Exception as error:
        for workspace in made:
            workspace.close(peers_alive=False)
        if not isinstance(error, PeerLost):
            communicator.fail(f"{type(error).__name__}: {error}")
        raise
    return backend


def _create(way: Any, communicator: Communicator, plan: Any, made: list[Workspace]) -> TrtllmBackend:
    index = paddle_side.enter_device(way.torch if way.kind == "torch" else None)
    if driver.is_capturing(paddle_side.stream_reader(index)()):
        raise WorkspaceError("a workspace can't be made while a CUDA graph is captured; open it before the capture")
    way.comm.trtllm_ar.get_trtllm_comm_module()  # builds the kernels where they are not prebuilt: it fails here if ever
    communicator.barrier()
    made.append(Workspace(way, communicator, plan))
    site = Site(plan.world_size, communicator.Get_rank(), plan.hidden_size, plan.dtype, plan.num_max_tokens, index)
    backend = TrtllmBackend(way, made[0], communicator, site)
    backend.choose_route()
    return backend
