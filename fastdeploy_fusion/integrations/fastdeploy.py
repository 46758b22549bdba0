"""In place of FastDeploy's ``flashinfer_comm_fusion`` module: the same names, over this library.

    from fastdeploy_fusion.integrations.fastdeploy import flashinfer_allreduce_residual_rmsnorm

Differences that callers may rely on: the reduction is over exactly ``fd_config.parallel_config.tp_group`` with in-group
ranks; the token limit comes from the configuration; there is always a result, never ``(None, None)``; workspaces are
keyed by group, hidden size and dtype, and are also given back at exit. ``apply`` wires a whole model.
"""

import atexit
import contextlib
import importlib.util
import logging
import sys
from typing import Any

import paddle
import paddle.distributed as dist

from ..channel import Channel
from ..config import DTYPES, FusionConfig
from ..errors import WorkspaceError
from ..fusion import AllReduceFusion
from ..groups import RankGroup
from ..host_values import DTYPE_NAMES
from .fastdeploy_model import Adoption, adopt
from .fastdeploy_workspace import FlashInferWorkspaceManager

__all__ = [
    "FlashInferWorkspaceManager",
    "apply",
    "cleanup_flashinfer_workspace",
    "ensure_workspace_initialized",
    "flashinfer_allreduce_residual_rmsnorm",
    "has_flashinfer",
]

log = logging.getLogger(__name__)

_SETTINGS = (
    "enable_flashinfer_allreduce_fusion",
    "flashinfer_allreduce_fusion_max_tokens",
    "flashinfer_allreduce_fusion_backend",
)
Key = tuple[tuple[int, ...], int, str, FusionConfig]

_managers: dict[Key, FlashInferWorkspaceManager] = {}
_found: dict[tuple[Any, ...], FlashInferWorkspaceManager] = {}
"""By the raw settings of a call: making and hashing a ``FusionConfig`` would cost 20 us each time."""
_captured_without: set[Key] = set()


def has_flashinfer() -> bool:
    """Whether a FlashInfer package is installed. Without one the calls below still give the right numbers."""
    return importlib.util.find_spec("flashinfer") is not None


def fusion_config(fd_config: Any, max_token_num: int | None = None) -> FusionConfig:
    """The settings in FastDeploy's configuration: ``parallel_config.enable_flashinfer_allreduce_fusion`` and, where
    they are there, ``flashinfer_allreduce_fusion_max_tokens`` and ``flashinfer_allreduce_fusion_backend``."""
    parallel = fd_config.parallel_config
    enabled, limit, backend = (getattr(parallel, name, None) for name in _SETTINGS)
    return FusionConfig(
        enabled=bool(enabled),
        backend=backend or "auto",
        num_max_tokens=max_token_num if max_token_num is not None else limit,
        deterministic=_is_batch_invariant(),
    )


def _is_batch_invariant() -> bool:
    """Whether FastDeploy, where it is loaded, was told to give every row the same bits in every batch."""
    module = sys.modules.get("fastdeploy.model_executor.layers.batch_invariant_ops")
    return module is not None and bool(module.is_batch_invariant_mode_enabled())


def manager_for(
    fd_config: Any, hidden_size: int, dtype: str, max_token_num: int | None = None
) -> FlashInferWorkspaceManager:
    """The open manager for the configuration's group and this shape, opened on first use. Collective then."""
    parallel = fd_config.parallel_config
    size, group = parallel.tensor_parallel_size, getattr(parallel, "tp_group", None)
    settings = [getattr(parallel, name, None) for name in _SETTINGS]
    raw = (*settings, size, group, hidden_size, dtype, max_token_num, _is_batch_invariant())
    manager = _found.get(raw)
    if manager is None or not manager.is_open:
        manager = _find(fd_config, size, group, hidden_size, dtype, max_token_num)
        if manager.is_open:
            _found[raw] = manager
    return manager


def _find(
    fd_config: Any, size: int, group: Any, hidden_size: int, dtype: str, max_token_num: int | None
) -> FlashInferWorkspaceManager:
    config = fusion_config(fd_config, max_token_num)
    members = tuple(sorted(group.ranks)) if size > 1 and group is not None else tuple(range(size))
    key = (members, hidden_size, dtype, config)
    manager = _managers.get(key)
    if manager is None:
        manager = FlashInferWorkspaceManager()
        try:
            manager.initialize(size, -1, None, hidden_size, group, dtype=dtype, config=config)
        except WorkspaceError as error:  # all ranks capture together, so all of them come here
            return _without_workspace(key, group, error)
        if not _managers:
            atexit.register(_cleanup_at_exit)
        _managers[key] = manager
    return manager


def _without_workspace(key: Key, group: Any, error: WorkspaceError) -> FlashInferWorkspaceManager:
    """A manager for this call alone: the plain path, which needs nothing but Paddle's group."""
    if key not in _captured_without:
        _captured_without.add(key)
        log.warning("the plain path goes into this graph: %s (ensure_workspace_initialized does it)", error)
    members = key[0]
    rank = members.index(dist.get_rank())
    manager = FlashInferWorkspaceManager()
    manager.fusion = AllReduceFusion(RankGroup(members, rank, group, Channel(rank, members, {})), key[3])
    return manager


def ensure_workspace_initialized(
    fd_config: Any, max_token_num: int | None = None, hidden_dim: int | None = None, use_fp32_lamport: bool = False
) -> bool:
    """Open the group's workspace; call it at start-up, before graphs are captured. Collective over ``tp_group``.

    Args:
        max_token_num: None: the configuration's limit, else measured ones. hidden_dim: None: the model's.
        use_fp32_lamport: float32 activations; otherwise the model's dtype.

    Returns:
        Whether sums will be fused; the same on all ranks. When not, the calls below still give the right numbers.
    """
    hidden = hidden_dim if hidden_dim is not None else fd_config.model_config.hidden_size
    dtype = "float32" if use_fp32_lamport else model_dtype(fd_config)
    return bool(manager_for(fd_config, hidden, dtype, max_token_num).initialized)


def model_dtype(fd_config: Any) -> str:
    """The activations' dtype: ``model_config.dtype``, else Paddle's default."""
    name = getattr(fd_config.model_config, "dtype", None)
    return name if name in DTYPES else str(paddle.get_default_dtype())


def flashinfer_allreduce_residual_rmsnorm(
    fd_config: Any,
    input_tensor: Any,
    residual: Any,
    weight: Any,
    eps: float = 1e-6,
    max_token_num: int | None = None,
    use_oneshot: bool | None = None,
    trigger_completion_at_end: bool = True,
    fp32_acc: bool = True,
) -> tuple[Any, Any]:
    """``residual_out = sum over tp_group of input_tensor + residual``, and its RMSNorm: ``(norm_out, residual_out)``.

    Fused where start-up proved it and the policy allows it, else by Paddle's collective; the numbers are the same, and
    so is the decision on all ranks of the group, which must all call this with equal shapes.

    Args:
        input_tensor: this rank's share, ``[num_tokens, hidden]``; residual: the same shape and dtype, or None.
        weight: ``[hidden]``. max_token_num: None: the configuration's limit, else measured ones.
        use_oneshot, trigger_completion_at_end, fp32_acc: accepted for FastDeploy's sake and not used: the backend knows
            what is fast and safe.

    Raises:
        ValueError: the configuration has sequence-parallel MoE: ranks hold different tokens, and nothing may be summed.
    """
    parallel = fd_config.parallel_config
    if getattr(parallel, "use_sequence_parallel_moe", False) and parallel.tensor_parallel_size > 1:
        raise ValueError(
            "parallel_config.use_sequence_parallel_moe is set: each rank holds its own tokens, already complete, and a "
            "sum over tp_group would mix different tokens; normalise without reducing, or switch it off"
        )
    manager = manager_for(fd_config, input_tensor.shape[-1], DTYPE_NAMES[input_tensor.dtype], max_token_num)
    return manager.opened.add_rms_norm(input_tensor, residual, weight, eps)


def cleanup_flashinfer_workspace() -> None:
    """Give all workspaces back: call it when the engine stops. Idempotent; later calls open them again."""
    _found.clear()
    while _managers:
        _managers.popitem()[1].cleanup()


def _cleanup_at_exit() -> None:
    with contextlib.suppress(Exception):  # a process that ends must not trip over what its peers have ended before
        cleanup_flashinfer_workspace()


def apply(model: Any, fd_config: Any = None, *, next_layer: bool = False) -> Adoption:
    """Wire a FastDeploy-style model, once it is built and before its weights are loaded. Collective over ``tp_group``.

    Every attention output whose layer has a ``post_attention_layernorm`` leaves its sum to that norm. Which ones: those
    marked by prefix in either spelling; all of them where the model marks none. Marks are taken out of all weight keys.

    Args:
        fd_config: None: the model's own, or its first layer's.
        next_layer: dense ``mlp.down_proj`` sums are left to the next layer's input norm (the final norm after the last
            layer) too. Only where nothing else reads what a decoder layer returns.
    """
    config = fd_config if fd_config is not None else _config_of(model)
    hidden, dtype = config.model_config.hidden_size, model_dtype(config)

    manager: FlashInferWorkspaceManager | None = None

    def fusion() -> AllReduceFusion:
        nonlocal manager
        if manager is None or not manager.is_open:
            manager = manager_for(config, hidden, dtype)
        return manager.opened

    if not fusion_config(config).enabled or config.parallel_config.tensor_parallel_size == 1:
        return adopt(model, None, hidden, next_layer=next_layer)
    fusion()
    return adopt(model, fusion, hidden, next_layer=next_layer)


def _config_of(model: Any) -> Any:
    for layer in [model, *model.sublayers()]:
        if getattr(layer, "fd_config", None) is not None:
            return layer.fd_config
    raise ValueError("neither the model nor any of its layers has an fd_config; pass it: apply(model, fd_config)")
