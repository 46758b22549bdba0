"""What each rank does in the tests of layouts."""

import time
from pathlib import Path
from typing import Any

import numpy as np
import paddle

from fastdeploy_fusion import FusionConfig, ParallelConfig
from fastdeploy_fusion.parallel import Parallel

DATA = Path(__file__).resolve().parents[1] / "data"
SAMPLING = {"max_new_tokens": 16, "ignore_eos": True}
GROUPS = {"tp": "attention_tp", "moe": "moe", "context": "context", "pipeline": "pipeline", "replica": "replica"}


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


def run_model(rank: int, num_ranks: int, sizes: dict[str, int], case: dict[str, Any]) -> dict[str, Any]:
    """One checkpoint under one layout, fused or not: how far the logits are off, the tokens, the sums."""
    from fastdeploy_fusion import models
    from tests.references import load_reference, round_rotary_as_the_reference_did

    folder = DATA / case["checkpoint"]
    layout = ParallelConfig(**sizes)
    prompts, logits, greedy = load_reference(folder)
    config = models.load_config(folder)
    marks = [time.monotonic()]
    with Parallel.open(layout, FusionConfig(enabled=case["fused"]), hidden_size=config.hidden_size) as parallel:
        marks.append(time.monotonic())
        if layout.data_parallel_size > 1:
            # Replicas owe each other nothing: the second one starts later, with fewer prompts in another order.
            time.sleep(parallel.place.data)
            chosen = [0, 1, 2, 3] if parallel.place.data == 0 else [3, 1]
            prompts, logits, greedy = ([values[i] for i in chosen] for values in (prompts, logits, greedy))
        model = models.load_model(folder, parallel, progress=False)
        round_rotary_as_the_reference_did(model, folder)
        num_forwards = count_calls(model, "forward")
        marks.append(time.monotonic())
        errors, tokens = {}, {}
        for way in case["ways"]:
            got = models.prompt_logits(model, prompts, packed=way == "packed")
            errors[way] = max(float(np.abs(g - w).max() / np.abs(w).max()) for g, w in zip(got, logits, strict=True))
            batches = [prompts] if way == "packed" else [[prompt] for prompt in prompts]
            params = models.SamplingParams(**SAMPLING)
            answers = [r.token_ids for batch in batches for r in models.generate(model, parallel, batch, params)]
            tokens[way] = answers == greedy
            marks.append(time.monotonic())
        parallel.replica.barrier()
        return {
            "errors": errors,
            "tokens": tokens,
            "forwards": num_forwards[0],
            "layers": len(model.layers),
            "first": model.stage.is_first,
            "counters": [[*key, count] for key, count in parallel.counters.items()],
            "params": sum(spec.param is not None for spec in model.checkpoint_tensors()),
            "seconds": np.round(np.diff(marks), 2).tolist(),
        }


def count_calls(owner: Any, name: str) -> list[int]:
    """Counts calls of a method from now on, in the one element of the list."""
    called, method = [0], getattr(owner, name)

    def counted(*args: Any) -> Any:
        called[0] += 1
        return method(*args)

    setattr(owner, name, counted)
    return called
