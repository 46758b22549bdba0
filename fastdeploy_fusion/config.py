"""Settings: frozen, checked when made, one home for each default, and the command-line flags that set them."""

import argparse
import dataclasses
from collections.abc import Collection
from dataclasses import dataclass, fields
from typing import Any, TypeVar

BACKENDS = ("auto", "trtllm", "mnnvl", "shm", "plain")
DTYPES = ("float32", "bfloat16", "float16")
MODES = ("auto", "on", "off")
ENABLE_FLAG = "--enable-flashinfer-allreduce-fusion"
MODE_FLAG = "--flashinfer-allreduce-fusion"
BACKEND_FLAG = "--flashinfer-allreduce-fusion-backend"
MAX_TOKENS_FLAG = "--flashinfer-allreduce-fusion-max-tokens"
DETERMINISTIC_FLAG = "--flashinfer-allreduce-fusion-deterministic"

T = TypeVar("T")


def check_positive(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} is {value!r}; it must be a whole number of at least 1")


def check_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name} is {value!r}; choose one of {', '.join(choices)}")


def _from_dict(cls: type[T], values: dict[str, Any]) -> T:
    known = [field.name for field in fields(cls)]  # type: ignore[arg-type]
    unknown = sorted(set(values) - set(known))
    if unknown:
        raise ValueError(f"unknown setting {', '.join(unknown)} for {cls.__name__}; known are {', '.join(known)}")
    return cls(**values)


@dataclass(frozen=True)
class FusionConfig:
    """How sums that a norm follows are reduced. Every rank of a group must hold the same values (checked at open).

    enabled: use a fused backend where one is proven; off by default, as in FastDeploy.
    backend: ``auto`` (trtllm on GPUs, shm on CPUs), or one by name; ``plain`` never fuses.
    num_max_tokens: more tokens than this take the plain path; None: the backend's own limit for the shape.
    deterministic: every sum is added in one fixed order whatever the batch, on whatever path: by backends that do so,
        else in rank order after gathering the shares, which moves more bytes.
    auto: not decided yet; ``settle`` turns it into ``enabled`` once model and layout are known.
    decided_by: what set ``enabled``, in words, for the log.
    """

    enabled: bool = False
    backend: str = "auto"
    num_max_tokens: int | None = None
    deterministic: bool = False
    auto: bool = False
    decided_by: str = dataclasses.field(default="", compare=False)

    def __post_init__(self) -> None:
        check_choice("backend", self.backend, BACKENDS)
        if self.auto and self.enabled:
            raise ValueError("auto and enabled are both set; auto means that enabled is not decided yet")
        if self.num_max_tokens is not None:
            check_positive("num_max_tokens", self.num_max_tokens)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "FusionConfig":
        """Unknown keys raise ``ValueError``."""
        return _from_dict(cls, values)

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> "FusionConfig":
        """Read what ``add_fusion_args`` added: ``off`` beats all, the plain flag means ``on`` and beats ``auto``."""
        mode = args.flashinfer_allreduce_fusion
        decided_by = "the default" if mode is None else f"{MODE_FLAG} {mode}"
        if args.enable_flashinfer_allreduce_fusion and mode != "off":
            mode, decided_by = "on", ENABLE_FLAG
        return cls(
            enabled=mode == "on",
            auto=mode == "auto",
            decided_by=decided_by,
            backend=args.flashinfer_allreduce_fusion_backend,
            num_max_tokens=args.flashinfer_allreduce_fusion_max_tokens,
            deterministic=args.flashinfer_allreduce_fusion_deterministic,
        )

    def settle(self, architecture: str, known: Collection[str], tensor_parallel_size: int) -> "FusionConfig":
        """With ``auto`` decided: on for a known architecture on more than one rank. Pure; equal on all ranks.

        Whether the backend is proven on this machine is for ``open`` to find out; where it is not, sums take the plain
        path. Without ``auto`` nothing changes.
        """
        if not self.auto:
            return self
        where = f"{architecture} on {tensor_parallel_size} tensor-parallel rank{'s' * (tensor_parallel_size > 1)}"
        why_not = f"{architecture} is not among {', '.join(sorted(known))}" if architecture not in known else None
        if tensor_parallel_size == 1:
            why_not = f"{where} has no sums"
        return dataclasses.replace(
            self, auto=False, enabled=why_not is None, decided_by=f"{self.decided_by or 'auto'}: {why_not or where}"
        )


@dataclass(frozen=True)
class ParallelConfig:
    """How many ranks do what; ``topology.py`` turns it into groups. All sizes are at least 1.

    tensor_parallel_size: ranks that share each layer's matrices, and hold the same tokens.
    expert_parallel_size: parts that the experts are dealt to, within one tensor-parallel group; the ranks of a part
        share each of its experts' matrices (MoE-TP of tensor_parallel_size / expert_parallel_size).
    context_parallel_size: tensor-parallel groups that split a prompt's tokens.
    pipeline_parallel_size: stages of consecutive layers.
    data_parallel_size: independent copies of all that.
    enable_dp_attention: ranks of one tensor-parallel group hold different tokens in attention.
    """

    tensor_parallel_size: int = 1
    expert_parallel_size: int = 1
    context_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1
    enable_dp_attention: bool = False

    def __post_init__(self) -> None:
        for field in fields(self):
            if field.name != "enable_dp_attention":
                check_positive(field.name, getattr(self, field.name))
        if self.tensor_parallel_size % self.expert_parallel_size:
            choices = [n for n in range(1, self.tensor_parallel_size + 1) if self.tensor_parallel_size % n == 0]
            raise ValueError(
                f"expert_parallel_size is {self.expert_parallel_size} and must divide tensor_parallel_size "
                f"{self.tensor_parallel_size}; choose one of {', '.join(map(str, choices))}"
            )

    @property
    def moe_tensor_parallel_size(self) -> int:
        """Ranks that share one expert's matrices."""
        return self.tensor_parallel_size // self.expert_parallel_size

    @property
    def world_size(self) -> int:
        """Ranks of the whole launch."""
        one_copy = self.tensor_parallel_size * self.context_parallel_size * self.pipeline_parallel_size
        return one_copy * self.data_parallel_size

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "ParallelConfig":
        """Unknown keys raise ``ValueError``."""
        return _from_dict(cls, values)

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> "ParallelConfig":
        """Read what ``add_parallel_args`` added."""
        return cls(**{field.name: getattr(args, field.name) for field in fields(cls)})


def positive_int(text: str) -> int:
    """An argparse type: a whole number of at least 1."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return value


def add_fusion_args(parser: argparse.ArgumentParser) -> None:
    """Add the fusion flags to an engine's parser; read them back with ``FusionConfig.from_args``."""
    group = parser.add_argument_group("all-reduce fusion")
    group.add_argument(
        ENABLE_FLAG,
        action="store_true",
        default=FusionConfig.enabled,
        help="reduce, add the residual and normalise in one kernel where it is proven (off by default)",
    )
    group.add_argument(
        MODE_FLAG,
        choices=MODES,
        help=f"on: as {ENABLE_FLAG}; auto: on for the architectures that are served here, on more than one "
        "tensor-parallel rank; off: never, whatever else is given",
    )
    group.add_argument(
        BACKEND_FLAG,
        choices=BACKENDS,
        default=FusionConfig.backend,
        help="auto: trtllm on GPUs, shm on CPUs (default: %(default)s)",
    )
    group.add_argument(
        MAX_TOKENS_FLAG,
        type=positive_int,
        metavar="N",
        default=FusionConfig.num_max_tokens,
        help="more tokens than N take the plain path (default: measured limits for the device and the shape)",
    )
    group.add_argument(
        DETERMINISTIC_FLAG,
        action="store_true",
        default=FusionConfig.deterministic,
        help="add every sum in rank order, so that a token's bits do not depend on the batch (off by default)",
    )


_LAYOUT_FLAGS = {
    "tensor_parallel_size": "ranks that share one copy of each layer",
    "expert_parallel_size": "parts that the experts are dealt to, within a tensor-parallel group",
    "context_parallel_size": "tensor-parallel groups that split a prompt's tokens",
    "pipeline_parallel_size": "stages of consecutive layers",
    "data_parallel_size": "independent copies of the model",
}


def add_parallel_args(parser: argparse.ArgumentParser) -> None:
    """Add the layout flags; read them back with ``ParallelConfig.from_args``."""
    group = parser.add_argument_group("layout")
    for name, meaning in _LAYOUT_FLAGS.items():
        group.add_argument(
            "--" + name.replace("_", "-"),
            type=positive_int,
            metavar="N",
            default=getattr(ParallelConfig, name),
            help=meaning + " (default: %(default)s)",
        )
    group.add_argument(
        "--enable-dp-attention",
        action="store_true",
        default=ParallelConfig.enable_dp_attention,
        help="ranks of one tensor-parallel group hold different tokens in attention; sums are then never fused",
    )
