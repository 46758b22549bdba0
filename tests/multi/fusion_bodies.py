"""What each rank does in the multi-process tests of the core. Values of 10^rank name in a sum who was added."""

import contextlib
import dataclasses
import logging
from typing import Any

import numpy as np
import paddle

from fastdeploy_fusion import AllReduceFusion, FusionConfig, groups, reference
from fastdeploy_fusion.backends.shm import chunk_rows
from fastdeploy_fusion.host_values import from_numpy, to_float64

EPS = 1e-5


def random(shape: tuple[int, ...], *seed: int, dtype: str = "float32") -> Any:
    return from_numpy(np.random.default_rng(seed).standard_normal(shape, dtype=np.float32), dtype)


def worst_error(
    fusion: AllReduceFusion,
    num_ranks: int,
    num_tokens: int,
    hidden: int,
    dtype: str,
    weight_dtype: str,
    has_residual: bool,
    weight_bias: float,
) -> float:
    """Relative to the largest value, over both outputs and the pure sum."""
    shape = (num_tokens, hidden)
    shares = [random(shape, rank, num_tokens, dtype=dtype) for rank in range(num_ranks)]
    residual = random(shape, 100, dtype=dtype) if has_residual else None
    weight = random((hidden,), 101, dtype=weight_dtype)
    norm, total = fusion.add_rms_norm(fusion.partial(shares[fusion.rank]), residual, weight, EPS, weight_bias)
    summed = fusion.all_reduce(shares[fusion.rank])
    arrays = [to_float64(share) for share in shares]
    left = None if residual is None else to_float64(residual)
    want_norm, want_total = reference.add_rms_norm(arrays, left, to_float64(weight), EPS, weight_bias)
    pairs = [(norm, want_norm), (total, want_total), (summed, np.sum(arrays, axis=0))]
    assert all(got.dtype == shares[0].dtype for got, _ in pairs)
    return max(float(np.abs(to_float64(got) - want).max() / np.abs(want).max()) for got, want in pairs)


def parity(rank: int, num_ranks: int, hidden: int, backend: str, limit: int | None) -> dict[str, Any]:
    """All dtypes and awkward token counts, with the limit in the middle of them."""
    rows = chunk_rows(hidden)
    token_counts = sorted({1, 2, 3, 7, rows, rows + 1, 2 * rows + 1})
    errors: dict[str, float] = {}
    counters: dict[str, int] = {}
    for dtype in ("float32", "bfloat16", "float16"):
        config = FusionConfig(enabled=True, backend=backend, num_max_tokens=limit)
        cases = [(dtype, True, 0.0), ("float32", True, 0.0), (dtype, False, 0.0), (dtype, True, 1.0)]
        with AllReduceFusion.open(config, hidden_size=hidden, dtype=dtype) as fusion:
            for case in sorted(set(cases)):
                for num_tokens in token_counts:
                    key = f"{dtype}/{case}/{num_tokens}"
                    errors[key] = worst_error(fusion, num_ranks, num_tokens, hidden, dtype, *case)
            for (_, path, reason), count in fusion.counters.items():
                counters[f"{path}: {reason}"] = counters.get(f"{path}: {reason}", 0) + count
    return {"errors": errors, "counters": counters}


def sums_by_group(rank: int, num_ranks: int, member_lists: list[list[int]], rounds: int) -> list[float | None]:
    """One sum of 10^rank a group, fused and plain by turns; None where this rank is outside."""
    made = [groups.new_group(members) for members in member_lists]
    config = FusionConfig(enabled=True)
    with contextlib.ExitStack() as stack:
        opened = [
            None if group is None else stack.enter_context(AllReduceFusion.open(config, group=group, hidden_size=8))
            for group in made
        ]
        results: list[float | None] = []
        for round_ in range(rounds):
            for fusion in opened:
                if fusion is None:
                    results.append(None)
                    continue
                shape = [1 + round_ % 3, 8]
                total = fusion.all_reduce(paddle.full(shape, 10.0**rank))
                assert len(np.unique(total.numpy())) == 1
                results.append(float(total[0, 0]))
                if fusion.world_size > 1:
                    assert {path for _, path, _ in fusion.counters} == {"fused"}
    return results


def special_values(rank: int, num_ranks: int) -> list[list[str]]:
    """-0.0, subnormals, inf and NaN on both paths; a NaN stays in its row."""
    rows = np.array([[-0.0, 0.0, -1e-40, 1.0], [np.nan, 1, 1, 1], [np.inf, 1, 1, 1], [1, 2, 3, 4]], np.float32)
    seen = []
    for backend in ("shm", "plain"):
        with AllReduceFusion.open(FusionConfig(enabled=True, backend=backend), hidden_size=4) as fusion:
            x = paddle.to_tensor(rows)
            norm, total = fusion.add_rms_norm(x, paddle.zeros([4, 4]), paddle.ones([4]), EPS)
            seen.append([np.array2string(t.numpy()) for t in (norm, total, fusion.all_reduce(x))])
            assert np.isfinite(norm.numpy()[[0, 3]]).all()
    return seen


def row_bits(rank: int, num_ranks: int, deterministic: bool, dtype: str) -> dict[str, Any]:
    """How many values of a row change with the batch that it comes in, over every path; and the paths."""
    config = FusionConfig(enabled=True, deterministic=deterministic, num_max_tokens=8)
    changed, paths = 0, set()
    x, residual, weight = (random(s, n, dtype=dtype) for s, n in (((17, 4096), rank), ((17, 4096), 50), ((4096,), 51)))
    for backend in ("shm", "plain"):
        opening = dataclasses.replace(config, backend=backend)
        with AllReduceFusion.open(opening, hidden_size=4096, dtype=dtype) as fusion:
            for left, scale in ((residual, weight), (residual, weight.astype("float32")), (None, weight)):
                whole = [to_float64(t) for t in fusion.add_rms_norm(x, left, scale, EPS)]
                whole.append(to_float64(fusion.all_reduce(x)))
                for start, stop in ((0, 1), (1, 4), (4, 17)):
                    part = None if left is None else left[start:stop]
                    got = [*fusion.add_rms_norm(x[start:stop], part, scale, EPS), fusion.all_reduce(x[start:stop])]
                    changed += sum(int((to_float64(g) != w[start:stop]).sum()) for g, w in zip(got, whole, strict=True))
            paths |= {path for _, path, _ in fusion.counters}
    return {"changed": changed, "paths": sorted(paths)}


def awkward_layouts(rank: int, num_ranks: int) -> bool:
    """Strided operands, three axes, no tokens, no residual, operands untouched: on both paths."""
    for backend in ("shm", "plain"):
        with AllReduceFusion.open(FusionConfig(enabled=True, backend=backend), hidden_size=8) as fusion:
            wide = paddle.full([4, 16], 10.0**rank)
            strided = wide[:, ::2]
            assert float(fusion.all_reduce(strided).max()) == 11.0
            norm, total = fusion.add_rms_norm(strided, wide[:, 8:], paddle.ones([8]), EPS)
            assert float(total.max()) == 11.0 + 10.0**rank, total
            deep = paddle.full([2, 3, 8], 10.0**rank)
            norm, total = fusion.add_rms_norm(deep, paddle.ones([2, 3, 8]), paddle.ones([8]), EPS)
            assert list(norm.shape) == [2, 3, 8] and float(total.min()) == 12.0
            assert list(fusion.all_reduce(deep).shape) == [2, 3, 8]
            assert list(fusion.all_reduce(paddle.ones([0, 8])).shape) == [0, 8]
            norm, total = fusion.add_rms_norm(deep[0], None, paddle.ones([8]), EPS)
            assert float(total.max()) == 11.0 and abs(float(norm.max()) - 1) < 1e-4
            assert float(deep.max()) == 10.0**rank
            check_gather(fusion, rank)
    return True


def check_gather(fusion: AllReduceFusion, rank: int) -> None:
    """Columns of all ranks side by side, one row and many, less and more than a chunk of shared memory."""
    for num_tokens, columns in ((1, 3), (5, 7), (3, 20000)):
        own = paddle.arange(num_tokens * columns, dtype="float32").reshape([num_tokens, columns]) + 1e6 * rank
        gathered = fusion.all_gather(own).numpy()
        assert gathered.shape == (num_tokens, columns * fusion.world_size)
        for other in range(fusion.world_size):
            part = gathered[:, other * columns : (other + 1) * columns]
            assert (part == own.numpy() + 1e6 * (other - rank)).all()


def refusal(rank: int, num_ranks: int, case: str) -> str:
    """What each rank is told when the ranks disagree, or the operands are wrong."""
    settings = {"limit": FusionConfig(enabled=True, num_max_tokens=4 + (rank if case == "config" else 0))}
    backend = "plain" if case.startswith("plain") else "shm"
    config = settings["limit"] if case == "config" else FusionConfig(enabled=True, backend=backend)
    hidden = 8 + 8 * (rank if case == "hidden" else 0)
    logging.basicConfig(level="WARNING")
    with AllReduceFusion.open(config, hidden_size=hidden) as fusion:
        if case in ("config", "hidden"):
            return str(fusion.explain([1, hidden]))
        try:
            if case.endswith("shape"):
                fusion.add_rms_norm(paddle.ones([1 + rank, 8]), paddle.ones([1 + rank, 8]), paddle.ones([8]), EPS)
            elif case == "op":
                fusion.all_reduce(paddle.ones([1, 8])) if rank else fusion.add_rms_norm(
                    paddle.ones([1, 8]), paddle.ones([1, 8]), paddle.ones([8]), EPS
                )
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return "no error"


def close_orders(rank: int, num_ranks: int) -> list[Any]:
    """Shared by its users, closed by the last, opened anew; also after Paddle's groups are gone."""
    config = FusionConfig(enabled=True)
    world = groups.init_world()
    first = AllReduceFusion.open(config, group=world, hidden_size=8)
    second = AllReduceFusion.open(config, group=world, hidden_size=8)
    shared = first._backend is second._backend
    first.close()
    after_one = float(second.all_reduce(paddle.full([1, 8], 10.0**rank))[0, 0])
    second.close()
    second.close()
    third = AllReduceFusion.open(config, group=world, hidden_size=16)
    after_two = float(third.all_reduce(paddle.full([1, 16], 10.0**rank))[0, 0])
    third.freeze()
    world.barrier()
    paddle.distributed.destroy_process_group()
    third.close()
    world.close()
    world.close()
    return [shared, after_one, after_two]


def never_closed(rank: int, num_ranks: int) -> bool:
    fusion = AllReduceFusion.open(FusionConfig(enabled=True), hidden_size=8)
    fusion.all_reduce(paddle.ones([1, 8]))
    globals()["_kept"] = fusion
    return True
