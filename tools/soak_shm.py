#!/usr/bin/env python3
"""Very many calls over shared memory, each result checked by a checksum on every rank.

    python tools/soak_shm.py                        # a million calls on 2 ranks
    python tools/soak_shm.py --calls 100000 --ranks 4

The calls change in operation, tokens and data in an order drawn from the seed. The data are whole numbers, so that a
sum has one right result, to the last bit; the norms are judged once by the reference and must have the same bits ever
after. Prints calls per second and PASS or FAIL; the exit code is 0 or 1.
"""

import argparse
import os
import sys
import time
import zlib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

EPS = 1e-5
NUM_OPERANDS = 64
MAX_TOKENS = 96  # more than a chunk at hidden 512: such a call takes several
SHOWN = 5


class Operands:
    """A pool of operands of one rank, with the checksums of what the group makes of them."""

    def __init__(self, rank: int, num_ranks: int, hidden: int, seed: int) -> None:
        import numpy as np
        import paddle

        from fastdeploy_fusion import reference

        draw = np.random.default_rng(seed)
        self.weight = paddle.ones([hidden])
        self.shares, self.residuals, self.sums, self.totals, self.norms = [], [], [], [], []
        for _ in range(NUM_OPERANDS):
            tokens = int(draw.choice([1, 1, 1, 2, 3, 8, MAX_TOKENS]))
            whole = draw.integers(-1000, 1000, [num_ranks + 1, tokens, hidden]).astype(np.float32)
            self.shares.append(paddle.to_tensor(whole[rank]))
            self.residuals.append(paddle.to_tensor(whole[-1]))
            self.sums.append(checksum(whole[:-1].sum(0)))
            self.totals.append(checksum(whole.sum(0)))
            ones = np.ones(hidden, np.float32)
            self.norms.append(reference.add_rms_norm(list(whole[:-1]), whole[-1], ones, EPS)[0])
        self.norm_checksums: dict[int, int] = {}

    def norm_is_right(self, index: int, norm: Any) -> bool:
        import numpy as np

        if index not in self.norm_checksums:
            if np.abs(norm - self.norms[index]).max() > 2e-6 * np.abs(self.norms[index]).max():
                return False
            self.norm_checksums[index] = checksum(norm)
        return self.norm_checksums[index] == checksum(norm)


def checksum(array: Any) -> int:
    return zlib.crc32(memoryview(array).cast("B"))


def soak(rank: int, num_ranks: int, num_calls: int, hidden: int, seed: int) -> dict[str, Any]:
    """Runs on every rank: calls made, seconds, and the first wrong ones."""
    import numpy as np

    from fastdeploy_fusion import AllReduceFusion, FusionConfig

    wrong: list[str] = []
    pool = Operands(rank, num_ranks, hidden, seed)
    with AllReduceFusion.open(FusionConfig(enabled=True, backend="shm"), hidden_size=hidden) as fusion:
        draw = np.random.default_rng(seed + 1)
        started = time.monotonic()
        for start in range(0, num_calls, 10000):
            count = min(10000, num_calls - start)
            indices, fused = draw.integers(NUM_OPERANDS, size=count).tolist(), (draw.random(count) < 0.5).tolist()
            for offset, (index, with_norm) in enumerate(zip(indices, fused, strict=True)):
                x = pool.shares[index]
                if with_norm:
                    norm, total = fusion.add_rms_norm(x, pool.residuals[index], pool.weight, EPS)
                    right = checksum(total.numpy()) == pool.totals[index] and pool.norm_is_right(index, norm.numpy())
                else:
                    right = checksum(fusion.all_reduce(x).numpy()) == pool.sums[index]
                if not right and len(wrong) < SHOWN:
                    wrong.append(f"call {start + offset}, {'add_rms_norm' if with_norm else 'all_reduce'} of {x.shape}")
        seconds = time.monotonic() - started
        paths = sorted({path for _, path, _ in fusion.counters})
        return {"calls": sum(fusion.counters.values()), "seconds": seconds, "wrong": wrong, "paths": paths}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=1_000_000)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--timeout", type=float, default=7200.0, help="seconds for all of it (default: %(default)s)")
    args = parser.parse_args()
    from tests.ranks import run_ranks

    os.chdir(ROOT)
    settings = (args.calls, args.hidden, args.seed)
    per_rank = run_ranks(args.ranks, "tools.soak_shm:soak", *settings, timeout_s=args.timeout)
    seconds = max(result["seconds"] for result in per_rank)
    wrong = [f"rank {rank}, {text}" for rank, result in enumerate(per_rank) for text in result["wrong"]]
    passed = not wrong and all(r["calls"] == args.calls and r["paths"] == ["fused"] for r in per_rank)
    print(
        f"{args.calls} calls on {args.ranks} ranks, float32, hidden {args.hidden}, 1 to {MAX_TOKENS} tokens, "
        f"seed {args.seed}"
    )
    print(f"{seconds:.0f} s, {args.calls / seconds:.0f} calls/s, every result checked on every rank")
    print("\n".join(["FAIL", *wrong]) if not passed else "PASS")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
