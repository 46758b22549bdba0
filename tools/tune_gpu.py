#!/usr/bin/env python3
"""`fastdeploy-fusion tune` under torchrun, for machines where Paddle is found on PYTHONPATH only.

    python -m torch.distributed.run --nproc_per_node 2 tools/tune_gpu.py --hidden 4096 --output tuned.json

All flags are `tune`'s; --limit S (default 560) is the time after which every rank ends itself, whatever it waits for.
"""

from __future__ import annotations

import sys

import gpu_ranks as ranks


def main(argv: list[str]) -> int:
    limit_s = 560.0
    if "--limit" in argv:
        at = argv.index("--limit")
        limit_s = float(argv[at + 1])
        del argv[at : at + 2]
    ranks.start(limit_s).close()
    from fastdeploy_fusion import cli

    return cli.main(["tune", *argv])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
