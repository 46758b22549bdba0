"""Every sum of one forward, found by running the model's own forward over stand-ins: no weights, no ranks, no GPU.

The model is built as it would be on one rank of the layout, but without memory for its weights. Blocks that end in a
sum (attention, MLP, experts, mixers) are not computed; each hands on what its last layer would: a complete tensor or a
``PartialSum``. Which norm takes which sum, and what is added up by itself, is then the model's code speaking.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from fastdeploy_fusion.config import FusionConfig, ParallelConfig
from fastdeploy_fusion.fusion import AllReduceFusion
from fastdeploy_fusion.groups import RankGroup
from fastdeploy_fusion.layers import PackedBatch, RMSNorm, complete
from fastdeploy_fusion.layers.parameter import without_memory
from fastdeploy_fusion.layers.sums import Owed, settle
from fastdeploy_fusion.parallel import Parallel
from fastdeploy_fusion.partial import PartialSum
from fastdeploy_fusion.policy import Op
from fastdeploy_fusion.topology import make_topology, why_not_fused

from .config import ModelConfig
from .registry import build


@dataclass(frozen=True)
class Step:
    """One step of a forward on one rank, in order.

    kind: ``embedding``, ``block``, ``norm``, or ``boundary`` (between pipeline stages).
    name: weight prefix; of a norm or block. what: the class that does it. layer: the decoder layer's number, or None.
    op: the reduction that happens in this step, or None. site: the weight prefix of the layer that owed that sum.
    owes: the site of a sum that this step leaves to the next norm, or None.
    group: the global ranks that reduce, or owe, together.
    """

    kind: str
    name: str
    what: str
    layer: int | None
    op: Op | None = None
    site: str | None = None
    owes: str | None = None
    group: tuple[int, ...] = ()


def trace(config: ModelConfig, layout: ParallelConfig, rank: int, fusion: FusionConfig, dtype: str) -> list[Step]:
    """The steps of one forward on one global rank of ``layout``. Pure; its sums are those that a run counts.

    Raises:
        ValueError: a size does not split over the layout, or the model does not run under it; as a run would say.
    """
    recorder = _Recorder()
    with without_memory():
        model = build(config, _pretend(layout, rank, fusion, recorder), dtype)
    recorder.attach(model)
    model.forward(_Rows(config.hidden_size), PackedBatch((0,), (0,), (1,)), None)
    return recorder.steps


class _Rows:
    """Stands for a tensor ``[1, hidden_size]``."""

    def __init__(self, hidden_size: int) -> None:
        self.shape = [1, hidden_size]


class _Anything:
    """Stands for what layers share about a batch; blocks that are not computed don't look at it."""

    def __getattr__(self, name: str) -> "_Anything":
        return self


class _PretendFusion(AllReduceFusion):
    """Reports each reduction instead of doing it."""

    def __init__(self, group: RankGroup, config: FusionConfig, recorder: "_Recorder") -> None:
        super().__init__(group, config)
        self._recorder = recorder

    def add_rms_norm(
        self, partial: Any, residual: Any, weight: Any, eps: float, weight_bias: float = 0.0
    ) -> tuple[Any, Any]:
        rows, site = self._unwrap(partial, "")
        self._recorder.reduced(Op.ADD_RMS_NORM, site, self.group.ranks)
        return rows, rows

    def all_reduce(self, partial: Any, site: str = "") -> Any:
        rows, site = self._unwrap(partial, site)
        if self.world_size > 1:
            self._recorder.reduced(Op.ALL_REDUCE, site, self.group.ranks)
        return rows


def _pretend(layout: ParallelConfig, rank: int, fusion: FusionConfig, recorder: "_Recorder") -> Parallel:
    """As ``Parallel.open``: one fusion a list of ranks, and none at all where the layout forbids it."""
    topology = make_topology(layout)
    settings = fusion if why_not_fused(layout) is None else FusionConfig()

    def group(name: str) -> RankGroup:
        return _pretend_group(topology.group_of(name, rank), rank)

    tp = _PretendFusion(group("attention_tp"), settings, recorder)
    alike = topology.group_of("moe", rank) == tp.group.ranks
    parallel = Parallel(
        layout,
        topology.place(rank),
        tp=tp,
        moe=tp if alike else _PretendFusion(group("moe"), settings, recorder),
        context=group("context"),
        pipeline=group("pipeline"),
        replica=group("replica"),
    )
    stages = topology.group_of("pipeline", rank)
    stage = stages.index(rank)
    parallel.before = _pretend_group(stages[stage - 1 : stage + 1], rank) if stage else None
    parallel.after = _pretend_group(stages[stage : stage + 2], rank) if rank != stages[-1] else None
    return parallel


def _pretend_group(members: tuple[int, ...], rank: int) -> RankGroup:
    nobody: Any = None
    return RankGroup(members, members.index(rank), nobody, nobody)


class _Recorder:
    """Puts stand-ins in a model's place of computing, and writes down what happens."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self._layer: int | None = None
        self._now: dict[str, Any] = {}

    def reduced(self, op: Op, site: str, group: tuple[int, ...]) -> None:
        self._now |= {"op": op, "site": site, "group": group}

    def attach(self, model: Any) -> None:
        model.new_step = lambda *_: _Anything()
        if hasattr(model, "embed_tokens"):
            embedding = model.embed_tokens
            embedding.forward = lambda rows: self._step(
                "embedding", embedding.prefix, embedding, lambda: embedding.tp.all_reduce(rows, embedding.prefix)
            )
        if hasattr(model, "norm"):
            self._watch_norm(model.norm)
        for number, layer in zip(model.stage.layers, model.layers, strict=True):
            self._watch_layer(number, layer)
        rows = _Rows(model.config.hidden_size)
        model.stage.receive = lambda *_: rows
        model.stage.send = lambda hidden, _: self._step(
            "boundary", f"model.layers.{model.stage.layers.stop}", model.stage, lambda: complete(hidden)
        )

    def _watch_layer(self, number: int, layer: Any) -> None:
        for part in layer.children():
            if isinstance(part, RMSNorm):
                self._watch_norm(part)
            else:
                self._replace_block(part)
        forward = layer.forward

        def counted(*args: Any) -> Any:
            self._layer = number
            result = forward(*args)
            self._layer = None
            return result

        layer.forward = counted

    def _watch_norm(self, norm: Any) -> None:
        forward = norm.forward

        def watched(x: Any, residual: Any = None) -> tuple[Any, Any]:
            work = (lambda: forward(x, residual)) if isinstance(x, PartialSum) else (lambda: (x, x))
            return self._step("norm", norm.key.removesuffix(".weight"), norm, work)

        norm.forward = watched

    def _replace_block(self, block: Any) -> None:
        owing = [part for part in _parts(block) if getattr(part, "owed", Owed.RAW) is not Owed.RAW]

        def replaced(rows: Any, *_: Any) -> Any:
            for part in owing[:-1]:
                self._step("block", part.prefix, part, lambda part=part: settle(rows, part.owed, part.tp, part.prefix))
            last = owing[-1] if owing else block
            finish = (lambda: settle(rows, last.owed, last.tp, last.prefix)) if owing else (lambda: rows)
            return self._step("block", getattr(last, "prefix", ""), block, finish)

        block.forward = replaced

    def _step(self, kind: str, name: str, layer: Any, work: Any) -> Any:
        """Run ``work`` and write down what it reduced, and what its result still owes."""
        self._now = {}
        result = work()
        if isinstance(result, PartialSum):
            self._now |= {"owes": result.site, "group": result.fusion.group.ranks}
        self.steps.append(Step(kind, name, type(layer).__name__, self._layer, **self._now))
        return result


def _parts(block: Any) -> Iterator[Any]:
    return iter(block.sublayers(include_self=True))


def sums(steps: Sequence[Step]) -> list[Step]:
    """The steps that reduce, in order: one entry of the run's counters each."""
    return [step for step in steps if step.op is not None]
