"""Which path a sum takes: one pure function of values that are equal on all ranks of the group.

A rank that chose alone would leave its peers waiting inside a kernel. So nothing here looks at device memory, time or
a local exception: the request's shape and dtypes are equal because all ranks of a tensor-parallel group run the same
layer on the same tokens; the group's state was voted on at start-up; the config's hash was compared then.
"""

from dataclasses import dataclass
from enum import Enum

from .config import DTYPES, FusionConfig

ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}
VECTOR_BYTES = 16
"""FlashInfer's kernels move 16-byte vectors, so a row must be a whole number of them."""

DEFAULT_NUM_MAX_TOKENS = 2048
"""FastDeploy's, SGLang's and vLLM's, for want of a better one."""

MIB = 1 << 20
LIMIT_BYTES = {
    # (SM, ranks): bytes of one operand up to which one fused kernel is ahead.
    # SM90, 2 ranks: measured on 2 x H200 against NCCL + one fused add-norm kernel (docs/tuning.md).
    (90, 2): 16 * MIB,
    # vLLM's and TensorRT-LLM's tables agree on these (256 and 64 tokens at hidden 4096).
    (90, 4): 2 * MIB,
    (90, 8): MIB // 2,
    # vLLM's table for Blackwell.
    (100, 2): 64 * MIB,
    (100, 4): 32 * MIB,
    (100, 8): 1 * MIB,
    (103, 2): 64 * MIB,
    (103, 4): 64 * MIB,
    (103, 8): 4 * MIB,
}


class Op(str, Enum):
    ADD_RMS_NORM = "add_rms_norm"
    ALL_REDUCE = "all_reduce"


class Path(str, Enum):
    FUSED = "fused"  # one call of the backend
    SUMMED = "summed"  # the sum by the backend, the norm on its own: what only the norm stands in the way of
    PLAIN = "plain"  # Paddle's collective, then the norm
    EMPTY = "empty"  # no rows, no collective


class Reason(str, Enum):
    """Why a path was taken. Each is explained in docs/troubleshooting.md."""

    FITS = "fits the fused workspace"
    NO_TOKENS = "no tokens"
    DISABLED = "fusion is off"
    ONE_RANK = "one rank"
    UNAVAILABLE = "no fused backend for this group"
    NOT_2D = "not a stack of rows"
    DTYPE = "dtype not supported by the fused backend"
    WEIGHT_DTYPE = "norm weight dtype differs from the activation dtype"
    HIDDEN_SIZE = "hidden size is not the workspace's"
    ALIGNMENT = "row is not a multiple of 16 bytes"
    TOKEN_LIMIT = "over the token limit"
    NO_RESIDUAL = "no residual"
    WEIGHT_BIAS = "norm weight bias, and the backend has none"
    NOT_DETERMINISTIC = "deterministic mode, and the backend is not"


@dataclass(frozen=True)
class Request:
    """One call. ``shape``: the operand's, rows last; what follows ``dtype`` matters to the norm only."""

    op: Op
    shape: tuple[int, ...]
    dtype: str
    weight_dtype: str | None = None
    has_residual: bool = True
    has_weight_bias: bool = False


@dataclass(frozen=True)
class GroupState:
    """What start-up agreed on for one group. ``unavailable``: why there is no fused backend, None when there is."""

    world_size: int
    unavailable: str | None = "not initialised"
    backend: str = "plain"
    hidden_size: int = 0
    num_max_tokens: int = 0
    all_reduce_max_tokens: int | None = None  # where a sum without a norm has a limit of its own
    dtypes: tuple[str, ...] = DTYPES
    deterministic: bool = False
    takes_weight_bias: bool = True

    def limit(self, op: Op) -> int:
        """More tokens than this are not fused."""
        own = self.all_reduce_max_tokens if op is Op.ALL_REDUCE else None
        return self.num_max_tokens if own is None else own


@dataclass(frozen=True)
class Decision:
    path: Path
    reason: Reason
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.path.value}: {self.reason.value}" + (f" ({self.detail})" if self.detail else "")


def decide(request: Request, state: GroupState, config: FusionConfig) -> Decision:
    """The path of one call. Pure; equal inputs on all ranks give equal answers (see the module's docstring)."""
    num_tokens = 1
    for size in request.shape[:-1]:
        num_tokens *= size
    if num_tokens == 0:
        return Decision(Path.EMPTY, Reason.NO_TOKENS)
    refusal = _refuse_group(state, config) or _refuse_sum(request, state)
    if refusal is not None:
        return Decision(Path.PLAIN, *refusal)
    if request.op is Op.ADD_RMS_NORM:
        refusal = _refuse_norm(request, state)
    if refusal is None and num_tokens > state.limit(request.op):
        refusal = Reason.TOKEN_LIMIT, f"{num_tokens} > {state.limit(request.op)}"
    if refusal is None:
        return Decision(Path.FUSED, Reason.FITS, state.backend)
    sums = request.op is Op.ADD_RMS_NORM and num_tokens <= state.limit(Op.ALL_REDUCE)
    return Decision(Path.SUMMED if sums else Path.PLAIN, *refusal)


def _refuse_group(state: GroupState, config: FusionConfig) -> tuple[Reason, str] | None:
    if not config.enabled:
        return Reason.DISABLED, ""
    if state.world_size == 1:
        return Reason.ONE_RANK, ""
    if state.unavailable is not None:
        return Reason.UNAVAILABLE, state.unavailable
    if config.deterministic and not state.deterministic:
        return Reason.NOT_DETERMINISTIC, state.backend
    return None


def _refuse_sum(request: Request, state: GroupState) -> tuple[Reason, str] | None:
    """Why the backend can't even add the operands up."""
    if len(request.shape) < 2:
        return Reason.NOT_2D, f"shape {list(request.shape)}"
    if request.dtype not in state.dtypes:
        return Reason.DTYPE, f"{request.dtype}; {state.backend} takes {', '.join(state.dtypes)}"
    hidden_size = request.shape[-1]
    if hidden_size != state.hidden_size:
        return Reason.HIDDEN_SIZE, f"{hidden_size}, opened for {state.hidden_size}"
    row_bytes = hidden_size * ITEMSIZE[request.dtype]
    if row_bytes % VECTOR_BYTES:
        return Reason.ALIGNMENT, f"{hidden_size} x {request.dtype} = {row_bytes} bytes"
    return None


def _refuse_norm(request: Request, state: GroupState) -> tuple[Reason, str] | None:
    """Why the backend can't add the residual and normalise in the same call."""
    if not request.has_residual:
        return Reason.NO_RESIDUAL, ""
    if request.weight_dtype != request.dtype:
        # Other systems read the fp32 weight as 16-bit values here, without an error.
        return Reason.WEIGHT_DTYPE, f"{request.weight_dtype} and {request.dtype}"
    if request.has_weight_bias and not state.takes_weight_bias:
        return Reason.WEIGHT_BIAS, state.backend
    return None


def limit_tokens(
    config: FusionConfig,
    sm: int | None,
    world_size: int,
    hidden_size: int,
    dtype: str,
    tuned: tuple[int, bool] | None = None,
    default: int = DEFAULT_NUM_MAX_TOKENS,
) -> int:
    """The token limit of a group: the user's, else the ``tuned`` one that was measured for this very case (0: the fused
    path never pays), else the built-in table's for the GPU (``sm``), else the backend's ``default``.

    Args:
        sm: compute capability as 90 or 100; None on a CPU.
        tuned: tokens, and whether the fused path was slower above. If not, it was ahead wherever it was measured, and
            the limit is at least the one that would hold without the measurement.
    """
    if config.num_max_tokens is not None:
        return config.num_max_tokens
    measured, crossed = tuned if tuned is not None else (0, False)
    if crossed:
        return measured
    limit_bytes = LIMIT_BYTES.get((sm, world_size)) if sm is not None else None
    if limit_bytes is None:
        return max(measured, default)
    return max(measured, 1, limit_bytes // (hidden_size * ITEMSIZE[dtype]))
