"""A step that does not end in time: the caller goes on, and the process still ends as it should."""

import subprocess
import sys
import time

import pytest

from fastdeploy_fusion.deadline import run_within


def test_results_and_exceptions_come_through():
    assert run_within(lambda: 3, 5, "step") == 3
    with pytest.raises(ZeroDivisionError):
        run_within(lambda: 1 / 0, 5, "step")


SLOW = """
import sys, time
from fastdeploy_fusion.deadline import run_within
def step():
    time.sleep(float(sys.argv[1]))
    print("ended", flush=True)
try:
    run_within(step, 0.1, "slow step")
except TimeoutError as error:
    print(error, flush=True)
"""


@pytest.mark.parametrize(("seconds", "ends"), [(0.7, True), (30, False)])
def test_the_process_waits_a_moment_for_it_at_exit(seconds, ends):
    begin = time.monotonic()
    done = subprocess.run([sys.executable, "-c", SLOW, str(seconds)], capture_output=True, text=True, timeout=20)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "slow step did not end within 0.1 s\n" + "ended\n" * ends
    assert time.monotonic() - begin < 10
