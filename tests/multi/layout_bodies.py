"""What each rank does in the tests of layouts."""

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import paddle

from fastdeploy_fusion import AllReduceFusion, FusionConfig, ParallelConfig
from fastdeploy_fusion.parallel import Parallel

DATA = Path(__file__).resolve().parents[1] / "data"
SAMPLING = {"max_new_tokens": 16, "ignore_eos": True}


def digits(rank: int, num_ranks: int, sizes: dict[str, int]) -> dict[str, list[float]]:
    """The sum of 10^rank over each group that this rank is in, by every way that it can be summed there."""
    layout = ParallelConfig(**sizes)
    mine = paddle.full([2, 8], 10.0**rank)
    with Parallel.open(layout, FusionConfig(enabled=True), hidden_size=8) as parallel:
        sums = {name: [getattr(parallel, name).all_reduce(mine)] for name in ("context", "pipeline", "replica")}
        for name in ("tp", "moe"):
            fusion = getattr(parallel, name)
            weight, residual = paddle.ones([8]), paddle.zeros([2, 8])
            sums[name] = [
                fusion.all_reduce(mine),
                fusion.add_rms_norm(mine, residual, weight, 1e-5)[1],
                fusion.group.all_reduce(mine),
            ]
            paths = {path for _, path, _ in fusion.counters}
            assert paths <= ({"fused"} if fusion.world_size > 1 else {"plain"}), fusion.counters
    for name, tensors in sums.items():
        assert all(len(np.unique(tensor.numpy())) == 1 for tensor in tensors), name
    return {name: [float(tensor[0, 0]) for tensor in tensors] for name, tensors in sums.items()}


def run_cases_of(rank: int, num_ranks: int, sizes: dict[str, int], cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Checkpoints under one layout, fused or not, over one set of groups."""
    layout = ParallelConfig(**sizes)
    with Parallel.open(layout, hidden_size=8) as groups:
        return [run_model(layout, groups, **case) for case in cases]


def run_model(
    layout: ParallelConfig, groups: Parallel, checkpoint: str, fused: bool, ways: list[str]
) -> dict[str, Any]:
    """How far the logits are off, whether the tokens are the reference's, and the sums that were reduced."""
    from fastdeploy_fusion import models
    from tests.references import load_reference, round_rotary_as_the_reference_did

    folder = DATA / checkpoint
    prompts, logits, greedy = load_reference(folder)
    if layout.data_parallel_size > 1:
        # Replicas owe each other nothing: the second one starts later, with fewer prompts in another order.
        time.sleep(groups.place.data)
        chosen = [0, 1, 2, 3] if groups.place.data == 0 else [3, 1]
        prompts, logits, greedy = ([values[i] for i in chosen] for values in (prompts, logits, greedy))
    config = models.load_config(folder)
    with over_the_same_groups(layout, groups, FusionConfig(enabled=fused), config.hidden_size) as parallel:
        model = models.load_model(folder, parallel, progress=False)
        round_rotary_as_the_reference_did(model, folder)
        num_forwards = count_calls(model, "forward")
        num_transfers = count_calls(model.stage, "send")
        num_gathers = count_calls(parallel.context, "all_gather")
        errors, tokens = {}, {}
        for way in ways:
            got = models.prompt_logits(model, prompts, packed=way == "packed")
            errors[way] = max(float(np.abs(g - w).max() / np.abs(w).max()) for g, w in zip(got, logits, strict=True))
            batches = [prompts] if way == "packed" else [[prompt] for prompt in prompts]
            params = models.SamplingParams(**SAMPLING)
            answers = [r.token_ids for batch in batches for r in models.generate(model, parallel, batch, params)]
            tokens[way] = answers == greedy
        return {
            "errors": errors,
            "tokens": tokens,
            "forwards": num_forwards[0],
            "transfers": num_transfers[0],
            "gathers": num_gathers[0],
            "layers": len(model.layers),
            "stage": parallel.place.stage,
            "prompt_lengths": [len(prompt) for prompt in prompts],
            "counters": [[*key, count] for key, count in parallel.counters.items()],
            "bytes": model.load_summary.num_bytes,
        }


@contextlib.contextmanager
def over_the_same_groups(
    layout: ParallelConfig, groups: Parallel, fusion: FusionConfig, hidden_size: int
) -> Iterator[Parallel]:
    """Making groups takes most of the time of a small run, so the cases of a layout share them."""
    with AllReduceFusion.open(fusion, group=groups.tp.group, hidden_size=hidden_size) as tp:
        names = ("context", "pipeline", "replica", "before", "after")
        shared = {name: getattr(groups, name) for name in names}
        yield Parallel(layout, groups.place, tp=tp, moe=tp, **shared)


def load_broken(rank: int, num_ranks: int, sizes: dict[str, int], folder: str) -> str:
    """What a rank is told about a checkpoint that lacks a tensor and has one too many."""
    from fastdeploy_fusion import models
    from fastdeploy_fusion.errors import CheckpointError

    with Parallel.open(ParallelConfig(**sizes), hidden_size=64) as parallel:
        try:
            models.load_model(folder, parallel, progress=False)
        except CheckpointError as error:
            return str(error)
    return "no error"


def count_calls(owner: Any, name: str) -> list[int]:
    """Counts calls of a method from now on, in the one element of the list."""
    called, method = [0], getattr(owner, name)

    def counted(*args: Any) -> Any:
        called[0] += 1
        return method(*args)

    setattr(owner, name, counted)
    return called
