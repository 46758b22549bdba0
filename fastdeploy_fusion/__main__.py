"""`python -m fastdeploy_fusion`: the same as the console script `fastdeploy-fusion`."""

import sys

from fastdeploy_fusion.cli import main

if __name__ == "__main__":
    sys.exit(main())
