"""Random layouts and calls against the reference. All is drawn from the seed, alike on every rank."""

import contextlib
import itertools
import zlib
from collections import Counter
from typing import Any

import numpy as np

from fastdeploy_fusion import AllReduceFusion, FusionConfig, ParallelConfig, groups, reference
from fastdeploy_fusion.groups import RankGroup
from fastdeploy_fusion.host_values import from_numpy, to_float64
from fastdeploy_fusion.topology import make_topology

EPS = 1e-5
HALF_ULP = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
SUMMATION = 3e-6  # of float32 sums and norms, relative to the largest value
AXES = ("tensor", "context", "pipeline", "data")


class Case:
    """One layout, a few fusions over its groups, and the calls to make on them."""

    def __init__(self, seed: int, number: int, num_ranks: int) -> None:
        self.draw = np.random.default_rng([seed, number])
        factors = [f for f in itertools.product(range(1, num_ranks + 1), repeat=4) if np.prod(f) == num_ranks]
        sizes = dict(zip(AXES, self.pick(factors), strict=True))
        parts = self.pick([n for n in range(1, sizes["tensor"] + 1) if sizes["tensor"] % n == 0])
        settings = {f"{axis}_parallel_size": int(size) for axis, size in sizes.items()}
        topology = make_topology(ParallelConfig(**settings, expert_parallel_size=parts))
        named = [getattr(topology, name) for name in ("attention_tp", "moe", "context", "pipeline", "replica")]
        listed = list(dict.fromkeys(members for family in named for members in family))
        several = [members for members in listed if len(members) > 1] or listed
        self.member_lists = [several[i] for i in self.draw.permutation(len(several))]
        self.fusions = [self.fusion(members) for members in self.member_lists]
        self.fusions += [self.fusion(self.pick(self.member_lists)) for _ in range(self.draw.random() < 0.2)]
        self.calls = [self.call() for _ in range(self.pick(range(4, 13)))]

    def pick(self, choices: Any) -> Any:
        return choices[int(self.draw.integers(len(choices)))]

    def fusion(self, members: tuple[int, ...]) -> dict[str, Any]:
        config = FusionConfig(
            enabled=self.draw.random() < 0.9,
            backend=self.pick(["auto", "auto", "auto", "shm", "plain"]),
            num_max_tokens=self.pick([None, None, None, 1, 3, 16]),
            deterministic=self.draw.random() < 0.2,
        )
        hidden = self.pick([4, 8, 10, 24, 64, 640, 1032])
        return {"members": members, "config": config, "hidden": hidden, "dtype": self.pick(list(HALF_ULP))}

    def call(self) -> dict[str, Any]:
        return {
            "fusion": int(self.draw.integers(len(self.fusions))),
            "op": self.pick(["add_rms_norm", "add_rms_norm", "all_reduce", "all_gather"]),
            "tokens": self.pick([0, 1, 1, 2, 3, 5, 17, 64]),
            "owed": self.draw.random() < 0.5,
            "has_residual": self.draw.random() < 0.9,
            "float32_weight": self.draw.random() < 0.1,
            "layout": self.pick(["rows", "rows", "strided", "three axes"]),
            "scale": self.pick([1.0, 1e-3, 30.0]),
        }


def random_sequences(rank: int, num_ranks: int, seed: int, num_cases: int) -> dict[str, Any]:
    """Runs all cases; what differs from the reference by more than rounding, and how often each path was taken."""
    world = groups.init_world()
    made: dict[tuple[int, ...], RankGroup | None] = {world.ranks: world}
    counters: Counter[str] = Counter()
    differences: list[str] = []
    for number in range(num_cases):
        case = Case(seed, number, num_ranks)
        for members in case.member_lists:
            if members not in made:
                made[members] = groups.new_group(members)
                world.barrier()
        with contextlib.ExitStack() as stack:
            opened = [open_if_member(stack, made[f["members"]], f) for f in case.fusions]
            for index, call in enumerate(case.calls):
                fusion, settings = opened[call["fusion"]], case.fusions[call["fusion"]]
                if fusion is not None:
                    worst = run_call(fusion, settings, call, [seed, number, index])
                    if worst > 1:
                        differences.append(f"case {number}, call {index}: {worst:.2f} x rounding, {settings}, {call}")
            for fusion in opened:
                if fusion is not None:
                    counters.update({f"{op} {path}": n for (op, path, _), n in fusion.counters.items()})
    num_groups = sum(len(members) > 1 for members in made)
    return {"differences": differences, "counters": dict(counters), "groups": num_groups}


def open_if_member(stack: contextlib.ExitStack, group: RankGroup | None, settings: dict[str, Any]) -> Any:
    if group is None:
        return None
    fusion = AllReduceFusion.open(
        settings["config"], group=group, hidden_size=settings["hidden"], dtype=settings["dtype"]
    )
    return stack.enter_context(fusion)


def run_call(fusion: AllReduceFusion, settings: dict[str, Any], call: dict[str, Any], seed: list[int]) -> float:
    """The largest difference from the reference, in units of what rounding allows; all ranks must hold equal bytes."""
    dtype, shape = settings["dtype"], [call["tokens"], settings["hidden"]]
    shares = [operand(shape, dtype, call, [*seed, member]) for member in range(fusion.world_size)]
    arrays = [to_float64(share) for share in shares]
    own = shares[fusion.rank]
    if call["op"] == "add_rms_norm":
        residual = operand(shape, dtype, call, [*seed, 98]) if call["has_residual"] else None
        weight = operand([1, shape[1]], "float32" if call["float32_weight"] else dtype, {}, [*seed, 99])[0]
        partial = fusion.partial(own) if call["owed"] else own
        got = list(fusion.add_rms_norm(partial, residual, weight, EPS))
        known = np.zeros_like(arrays[0]) if residual is None else to_float64(residual)
        want = list(reference.add_rms_norm(arrays, known, to_float64(weight), EPS))
    elif call["op"] == "all_reduce":
        got, want = [fusion.all_reduce(own)], [np.sum(arrays, axis=0)]
    else:
        got, want = [fusion.all_gather(own)], [np.concatenate(arrays, axis=-1)]
    assert all(
        tensor.dtype == own.dtype and list(tensor.shape) == list(w.shape) for tensor, w in zip(got, want, strict=True)
    )
    assert np.array_equal(to_float64(own), arrays[fusion.rank]), "the operand was changed"
    fusion.group.check_equal([zlib.crc32(to_float64(tensor).tobytes()) for tensor in got], "equal bytes")
    return max(excess(tensor, exact, dtype) for tensor, exact in zip(got, want, strict=True))


def excess(got: Any, want: np.ndarray, dtype: str) -> float:
    """1: as far from the reference as one rounding to ``dtype``, and float32 sums before it, may be."""
    if not want.size:
        return 0.0
    allowed = HALF_ULP[dtype] * np.abs(want) + SUMMATION * np.abs(want).max() + 2.0**-25 * (dtype == "float16")
    return float((np.abs(to_float64(got) - want) / allowed).max())


def operand(shape: list[int], dtype: str, call: dict[str, Any], seed: list[int]) -> Any:
    rows, hidden = shape
    scale = call.get("scale", 1.0)
    values = np.random.default_rng(seed).standard_normal((rows, hidden), dtype=np.float32) * np.float32(scale)
    tensor = from_numpy(values, dtype)
    if call.get("layout") == "strided":
        doubled = from_numpy(np.repeat(values, 2, axis=1), dtype)
        return doubled[:, ::2]
    if call.get("layout") == "three axes":
        return tensor.reshape([1, rows, hidden])
    return tensor
