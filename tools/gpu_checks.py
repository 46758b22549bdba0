"""Sections of verify_gpu.py: numbers of the fused calls, and the table of all sections."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import gpu_ranks as ranks
import numpy as np

EPS = 1e-6
# Of the largest value, against float64: the kernel rounds the sum, the sum with the residual, and the norm.
TOLERANCE = {"float16": 2e-3, "bfloat16": 1.6e-2, "float32": 1e-5}


class Context:
    """What a section gets: the group, the arguments, and a list of failures that is judged at its end."""

    def __init__(self, group: Any, args: Any) -> None:
        self.group, self.args = group, args
        self.failures: list[str] = []

    def check(self, good: bool, what: str) -> None:
        """Note a failure and go on: a rank that leaves alone would hang the others."""
        if not good:
            self.failures.append(what)

    def judge(self) -> None:
        if self.failures:
            raise AssertionError(f"{len(self.failures)} wrong, first: {self.failures[0]}")

    @contextmanager
    def fusion(self, hidden: int, dtype: str, max_tokens: int = 2048, **more: Any) -> Iterator[Any]:
        """An open AllReduceFusion on the trtllm backend; fails where it stood down."""
        from fastdeploy_fusion import AllReduceFusion, FusionConfig

        config = FusionConfig(enabled=True, backend="trtllm", num_max_tokens=max_tokens, **more)
        with AllReduceFusion.open(config, group=self.group, hidden_size=hidden, dtype=dtype) as fusion:
            decision = fusion.explain([1, hidden])
            if decision.path.value != "fused":
                raise AssertionError(f"not fused: {decision}")
            yield fusion

    def backend(self, fusion: Any) -> Any:
        return ranks.live_backend(fusion)


class Data:
    """Random operands, the same on all ranks: every rank knows every rank's partial sums."""

    def __init__(self, num_ranks: int, tokens: int, hidden: int, seed: int = 1) -> None:
        rng = np.random.default_rng(seed)
        self.partials = [rng.standard_normal((tokens, hidden), "float32") for _ in range(num_ranks)]
        self.residual = rng.standard_normal((tokens, hidden), "float32")
        self.weight = (1 + 0.1 * rng.standard_normal(hidden, "float32")).astype("float32")

    def cut(self, tokens: int, hidden: int, dtype: str) -> tuple[list[np.ndarray], np.ndarray, np.ndarray]:
        """(partials, residual, weight) of this size, exact in dtype."""
        parts = [ranks.rounded(part[:tokens, :hidden], dtype) for part in self.partials]
        return parts, ranks.rounded(self.residual[:tokens, :hidden], dtype), ranks.rounded(self.weight[:hidden], dtype)


def expected(parts: list[np.ndarray], residual: np.ndarray, weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(norm, residual_out) in float64."""
    total = np.sum([part.astype("float64") for part in parts], 0) + residual
    return total / np.sqrt((total**2).mean(-1, keepdims=True) + EPS) * weight, total


def kernel_residual(parts: list[np.ndarray], residual: np.ndarray, dtype: str) -> np.ndarray:
    """residual_out to the bit as the kernel rounds: the sum, added up in float32, then the sum with the residual."""
    return ranks.rounded(ranks.rounded(np.sum(parts, 0, "float32"), dtype) + residual, dtype)


def off(result: Any, wanted: np.ndarray) -> float:
    """Largest error, relative to the largest value; infinite where the result is not finite."""
    got = ranks.values_of(result)
    if got.shape != wanted.shape or not np.isfinite(got).all():
        return float("inf")
    return float(np.abs(got - wanted).max() / np.abs(wanted).max())


def matrix(context: Context) -> None:
    """Every shape and dtype by the public call, then by each launch option; zero tokens too."""
    args, group = context.args, context.group
    sizes = [int(text) for text in args.hidden.split(",")]
    counts = [int(text) for text in args.tokens.split(",")]
    data = Data(group.size, max(counts), max(sizes))
    for hidden in sizes:
        for dtype in args.dtypes.split(","):
            with context.fusion(hidden, dtype, max(counts)) as fusion:
                worst = _one_size(context, fusion, data, hidden, dtype, counts)
                route = context.backend(fusion).route
            ranks.say(
                group, f"  hidden {hidden:5} {dtype:8} route {route}: worst error norm {worst[0]:.1e}, "
                f"residual {worst[1]:.1e}, all-reduce {worst[2]:.1e}; residual bits as predicted: {worst[3]:.4%}"
            )  # fmt: skip
    context.judge()


def _one_size(
    context: Context, fusion: Any, data: Data, hidden: int, dtype: str, counts: list[int]
) -> tuple[float, float, float, float]:
    from fastdeploy_fusion.backends.flashinfer.launchers import Options

    group, backend = context.group, context.backend(fusion)
    route, worst, same = backend.route, [0.0, 0.0, 0.0], []
    for tokens in (0, *counts):
        parts, residual, weight = data.cut(tokens, hidden, dtype)
        operands = [ranks.tensor(array, dtype) for array in (parts[group.rank], residual, weight)]
        if tokens == 0:
            _zero_tokens(context, fusion, operands, hidden)
            continue
        wanted = (*expected(parts, residual, weight), np.sum(parts, 0, "float64"))
        predicted = kernel_residual(parts, residual, dtype)
        options = [Options()]
        if tokens > group.size:
            options += [Options(pdl, oneshot) for pdl in (True, False) for oneshot in (True, False)][1:]
        for option in options:
            backend.use(route, option)
            outs = (*fusion.add_rms_norm(*operands, EPS), fusion.all_reduce(operands[0]))
            for i, (name, out) in enumerate(zip(("norm", "residual", "all-reduce"), outs, strict=True)):
                error = off(out, wanted[i])
                worst[i] = max(worst[i], error)
                where = f"{name} [{tokens}, {hidden}] {dtype} {option}: off by {error:.1e}"
                context.check(error <= TOLERANCE[dtype], where)
            same.append(float((ranks.values_of(outs[1]) == predicted).mean()))
    backend.use(route)
    return worst[0], worst[1], worst[2], float(np.mean(same))


def _zero_tokens(context: Context, fusion: Any, operands: list[Any], hidden: int) -> None:
    """Nothing is launched, so that an exception here leaves the ranks in step."""
    try:
        outs = (*fusion.add_rms_norm(*operands, EPS), fusion.all_reduce(operands[0]))
        context.check(all(list(out.shape) == [0, hidden] for out in outs), "zero tokens: wrong shapes")
    except Exception as error:
        context.check(False, f"zero tokens: {type(error).__name__}: {error}")


def chain(context: Context) -> None:
    """Back-to-back calls, each one's residual and input the outputs of the one before, to the bit."""
    group, hidden, dtype, steps = context.group, 4096, "bfloat16", 200
    with context.fusion(hidden, dtype) as fusion:
        for tokens in (1, 3, 16, 128):
            parts, residual, weight = Data(group.size, tokens, hidden, seed=tokens).cut(tokens, hidden, dtype)
            parts = [ranks.rounded(part / 64, dtype) for part in parts]
            partial, gamma = ranks.tensor(parts[group.rank], dtype), ranks.tensor(weight, dtype)
            carried = ranks.tensor(residual, dtype)
            for _ in range(steps):
                norm_out, carried = fusion.add_rms_norm(partial, carried, gamma, EPS)
            for _ in range(steps):
                before, residual = residual, kernel_residual(parts, residual, dtype)
            right = float((ranks.values_of(carried) == residual).mean())
            context.check(right >= 0.9999, f"{tokens} tokens: {1 - right:.2%} of the last residual's bits are wrong")
            error = off(norm_out, expected(parts, before, weight)[0])
            context.check(error <= TOLERANCE[dtype], f"{tokens} tokens: last norm off by {error:.1e}")
    context.judge()


def special(context: Context) -> None:
    """NaN, infinities and -0.0 (which marks unwritten memory inside the kernel) give what the reference gives."""
    group, hidden = context.group, 2048
    for dtype in ("float16", "bfloat16"):
        parts, residual, weight = Data(group.size, 8, hidden).cut(8, hidden, dtype)
        parts[-1][1, 5] = np.nan
        parts[0][2, 7] = np.inf
        for part in parts:
            part[3] = -0.0
        residual[3] = -0.0
        parts[0][4, ::2] = -0.0
        with context.fusion(hidden, dtype) as fusion:
            operands = [ranks.tensor(array, dtype) for array in (parts[group.rank], residual, weight)]
            norm_out, residual_out = (ranks.values_of(out) for out in fusion.add_rms_norm(*operands, EPS))
        with np.errstate(invalid="ignore"):
            norm, total = expected(parts, residual, weight)
        context.check(np.isnan(norm_out[1]).all(), f"{dtype}: a NaN does not reach its whole row's norm")
        context.check(bool(np.isnan(residual_out[1, 5])), f"{dtype}: a NaN does not reach the residual")
        context.check(np.isfinite(np.delete(residual_out[1], 5)).all(), f"{dtype}: a NaN spreads in the residual")
        context.check(residual_out[2, 7] == np.inf, f"{dtype}: an infinity does not reach the residual")
        context.check((norm_out[3] == 0).all() and (residual_out[3] == 0).all(), f"{dtype}: a row of -0.0 is not 0")
        for row in (0, 3, 4, 5, 6, 7):
            close = np.abs(norm_out[row] - norm[row]).max() <= TOLERANCE[dtype] * np.abs(norm[0]).max()
            context.check(bool(close), f"{dtype}: row {row} beside special values is wrong")
        context.check(bool(np.isclose(residual_out[0], total[0], rtol=1e-2, atol=1e-2).all()), f"{dtype}: row 0")
    context.judge()


def pair(context: Context) -> None:
    """RowParallelLinear (cuBLAS) into RMSNorm: the layers, one sum, taken by the fused path."""
    from fastdeploy_fusion.host_values import to_bits
    from fastdeploy_fusion.layers.linear import RowParallelLinear
    from fastdeploy_fusion.layers.norm import RMSNorm
    from fastdeploy_fusion.sites import fusable

    group, hidden, inner, tokens = context.group, 4096, 8192, 33
    for dtype in ("float16", "bfloat16"):
        rng = np.random.default_rng(7)
        x = ranks.rounded(rng.standard_normal((tokens, inner), "float32"), dtype)
        matrix_values = ranks.rounded(rng.standard_normal((hidden, inner), "float32") / 64, dtype)
        residual = ranks.rounded(rng.standard_normal((tokens, hidden), "float32"), dtype)
        gamma = ranks.rounded(1 + rng.standard_normal(hidden, "float32") / 8, dtype)
        mine = slice(group.rank * inner // group.size, (group.rank + 1) * inner // group.size)
        with context.fusion(hidden, dtype) as fusion:
            linear = RowParallelLinear(inner, hidden, tp=fusion, prefix=fusable("layer.o_proj"), dtype=dtype)
            norm = RMSNorm(hidden, EPS, tp=fusion, prefix="layer.norm", dtype=dtype)
            linear.weight.set_value(to_bits(matrix_values[:, mine], dtype))
            norm.weight.set_value(to_bits(gamma, dtype))
            owed = linear(ranks.tensor(x[:, mine], dtype))
            context.check(type(owed).__name__ == "PartialSum", f"{dtype}: the linear layer owes no sum")
            norm_out, residual_out = norm(owed, ranks.tensor(residual, dtype))
            fused = sum(n for (op, path, _), n in fusion.counters.items() if path == "fused")
            context.check(fused == 1, f"{dtype}: {dict(fusion.counters)} instead of one fused call")
        parts = [
            ranks.rounded(x[:, s].astype("float64") @ matrix_values[:, s].T.astype("float64"), dtype)
            for s in (slice(r * inner // group.size, (r + 1) * inner // group.size) for r in range(group.size))
        ]
        wanted = expected(parts, residual, gamma)
        for name, out, want in zip(("norm", "residual"), (norm_out, residual_out), wanted, strict=True):
            error = off(out, want)
            context.check(error <= TOLERANCE[dtype], f"{name} {dtype}: off by {error:.1e}")
    context.judge()


def _sections() -> dict[str, Callable[[Context], None]]:
    import gpu_checks_life as life
    import gpu_checks_memory

    return {
        "matrix": matrix, "chain": chain, "special": special, "stream": life.stream, "graph": life.graph,
        "pair": pair, "memory": gpu_checks_memory.memory, "refuse": gpu_checks_memory.refuse, "soak": life.soak,
    }  # fmt: skip


SECTIONS = _sections()
