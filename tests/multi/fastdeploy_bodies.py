"""What each rank does in test_fastdeploy.py. Values of 10^rank name in a sum who was added."""

from typing import Any

import numpy as np
import paddle

from fastdeploy_fusion import groups
from fastdeploy_fusion.errors import FusionError
from fastdeploy_fusion.integrations import fastdeploy as fd
from fastdeploy_fusion.partial import PartialSum
from tests import fastdeploy_shapes as shapes


def tp_group_of(rank: int, num_ranks: int, tp_size: int) -> tuple[Any, int]:
    """(Paddle's group of this rank's tensor-parallel ranks, its place in it); one group a data-parallel copy."""
    groups.init_world()
    mine = None
    for first in range(0, num_ranks, tp_size):
        made = groups.new_group(range(first, first + tp_size))
        mine = made or mine
    assert mine is not None
    mine.close()
    return mine.paddle_group, mine.rank


def function(rank: int, num_ranks: int, tp_size: int, flag: bool, limit: int | None) -> dict[str, Any]:
    """The module's functions, by turns on few and on many tokens, across a clean-up."""
    group, place = tp_group_of(rank, num_ranks, tp_size)
    config = shapes.fd_config(tp_size, place, group, flag=flag, limit=limit)
    weight = paddle.ones([shapes.HIDDEN])
    fused = fd.ensure_workspace_initialized(config)
    found: dict[str, Any] = {"fused": fused, "sums": {}, "norm": []}
    for _ in range(2):
        for tokens in (0, 1, 3, 40):
            share = paddle.full([tokens, shapes.HIDDEN], 10.0**rank)
            for residual in (paddle.full([tokens, shapes.HIDDEN], 0.5), None):
                norm, total = fd.flashinfer_allreduce_residual_rmsnorm(config, share, residual, weight, eps=1e-6)
                assert norm.shape == total.shape == [tokens, shapes.HIDDEN]
                key = f"{tokens}/{residual is not None}"
                found["sums"].setdefault(key, []).append(sorted(set(total.numpy().ravel().tolist())))
                if tokens:
                    found["norm"].append(float(np.abs(norm.numpy() - 1).max()))
        (manager,) = fd._managers.values()
        assert (manager.rank, manager.world_size) == (place, tp_size)
        found["paths"] = sorted({path for _, path, _ in manager.opened.counters})
        fd.cleanup_flashinfer_workspace()
        fd.cleanup_flashinfer_workspace()
        assert not manager.initialized and not fd._managers
    return found


def wrong_group(rank: int, num_ranks: int) -> str:
    config = shapes.fd_config(num_ranks + 1, rank, None, flag=True)
    groups.init_world().close()
    try:
        fd.ensure_workspace_initialized(config)
    except ValueError as error:
        return str(error)
    return "no error"


def model(rank: int, num_ranks: int, tp_size: int, mark: str, next_layer: bool, limit: int | None) -> dict[str, Any]:
    """A wired model beside the same one with the flag off, loaded from one checkpoint with clean keys."""
    group, place = tp_group_of(rank, num_ranks, tp_size)
    plain = shapes.Model(shapes.fd_config(tp_size, place, group, flag=False), "")
    plain.load(shapes.state_dict())
    wired = shapes.Model(shapes.fd_config(tp_size, place, group, flag=True, limit=limit), mark)
    names = [name for name, _ in wired.named_parameters()]
    done = fd.apply(wired, next_layer=next_layer)
    wired.load(shapes.state_dict())
    assert names == [name for name, _ in wired.named_parameters()] == [name for name, _ in plain.named_parameters()]
    again = fd.apply(wired, next_layer=next_layer)
    assert not again.sums and not again.renamed
    differences = []
    # A data-parallel copy has tokens of its own: nothing may come over from the other.
    rng = np.random.default_rng(rank // tp_size)
    for tokens in (5, 1, 20):
        x = paddle.to_tensor(rng.standard_normal((tokens, shapes.HIDDEN), np.float32))
        want, got = plain(x).numpy(), wired(x).numpy()
        differences.append(float(np.abs(want - got).max() / np.abs(want).max()))
    (manager,) = fd._managers.values()
    counted = sorted([*key, calls] for key, calls in manager.opened.counters.items())
    fd.cleanup_flashinfer_workspace()
    x = paddle.ones([2, shapes.HIDDEN])
    differences.append(float(np.abs(plain(x).numpy() - wired(x).numpy()).max()))  # opens again by itself
    fd.cleanup_flashinfer_workspace()
    return {
        "differences": differences, "counted": counted, "sums": done.sums, "skipped": done.skipped,
        "renamed": done.renamed, "engine_calls": wired.layers[1].post_attention_layernorm.engine_calls,
    }  # fmt: skip


def engine_norms(rank: int, num_ranks: int) -> list[float]:
    """A norm that does more than a norm gets the complete sum, and does it itself."""
    group, place = tp_group_of(rank, num_ranks, num_ranks)
    wired = shapes.Model(shapes.fd_config(num_ranks, place, group, flag=True), "enable_all_reduce.")
    fd.apply(wired)
    wired.load(shapes.state_dict())
    attention, norm = wired.layers[0].self_attn, wired.layers[0].post_attention_layernorm
    found = []
    for special in ("proxy", "quant", "no residual", "dtype"):
        owed = attention(None, paddle.ones([2, shapes.HIDDEN]))
        assert isinstance(owed, PartialSum)
        before = norm.engine_calls
        norm.quant_scale = 0.5 if special == "quant" else None
        residual = None if special == "no residual" else paddle.zeros([2, shapes.HIDDEN])
        if special == "dtype":
            residual = residual.astype("float64")
        seven = paddle.full([1], 7.0)
        proxy = {"proxy_rmsnorm": lambda total, weight, eps, seven=seven: seven} if special == "proxy" else {}
        if special == "quant":  # a look at another shape: the decision for a shape is kept
            owed = attention(None, paddle.ones([3, shapes.HIDDEN]))
            residual = paddle.zeros([3, shapes.HIDDEN])
        _, total = norm(owed, residual, **proxy)
        found += [norm.engine_calls - before, float(total.numpy()[0, 0])]
    try:
        attention(None, paddle.ones([2, shapes.HIDDEN])) + 1
    except TypeError:
        found.append(-1.0)
    fd.cleanup_flashinfer_workspace()
    try:
        fd.FlashInferWorkspaceManager().opened  # noqa: B018
    except FusionError:
        found.append(-2.0)
    return found
