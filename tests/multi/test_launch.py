"""The launcher: whatever happens to a rank or to the launcher itself, all ends, with the first error said once."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fastdeploy_fusion.errors import CheckpointError, PeerLost
from tests.leftovers import processes_with

TOKEN = ("LAUNCH_TEST_TOKEN", f"{os.getpid()}.")  # in the environment of all that this file starts


@pytest.fixture(autouse=True)
def end_what_a_failed_test_leaves():
    yield
    for pid in processes_with("=".join(TOKEN)):
        os.kill(pid, signal.SIGKILL)


def target(argv):
    """Runs in the ranks; argv: what to do, then its arguments."""
    return globals()[f"do_{argv[0]}"](int(os.environ["PADDLE_TRAINER_ID"]), *argv[1:])


def do_fine(rank):
    print(f"out {rank}")
    print(f"err {rank}", file=sys.stderr)
    return 0


def do_environment(rank):
    print(*[os.environ[name] for name in ("PADDLE_TRAINERS_NUM", "PADDLE_TRAINER_ID", "OMP_NUM_THREADS")])
    return 0


def do_kill(rank, victim):
    if rank == int(victim):
        print("last words", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def do_raise(rank, victim):
    if rank == int(victim):
        time.sleep(0.5)
        raise ArithmeticError("no such sum")
    if rank == 0:
        raise PeerLost("rank 2 is lost")  # sooner than the cause is heard of
    time.sleep(60)


def do_only_lost(rank):
    if rank == 0:
        raise PeerLost("rank 1 does not answer")
    time.sleep(60)


def do_wrong_input(rank):
    raise UsageLike("no such model")


class UsageLike(CheckpointError):
    exit_code = 2


def do_leave(rank):
    if rank == 1:
        os._exit(0)
    time.sleep(60)


def do_sleep(rank, folder):
    Path(folder, str(rank)).write_text(str(os.getpid()))
    time.sleep(60)


def do_stubborn(rank, folder):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    do_sleep(rank, folder)


def start(num_ranks, *argv, show_traceback=False, **environment):
    code = (
        "import sys; from fastdeploy_fusion.supervise import launch; "
        f"sys.exit(launch('tests.multi.test_launch:target', {list(argv)!r}, {num_ranks}, "
        f"show_traceback={show_traceback}))"
    )
    env = {**os.environ, TOKEN[0]: TOKEN[1], **environment}
    return subprocess.Popen(
        [sys.executable, "-c", code], env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def finish(launcher, timeout=20):
    begin = time.monotonic()
    out, err = launcher.communicate(timeout=timeout)
    assert time.monotonic() - begin < 10
    assert_gone()
    return launcher.returncode, out, err


def assert_gone():
    deadline = time.monotonic() + 2
    while left := processes_with("=".join(TOKEN)):
        assert time.monotonic() < deadline, f"processes left: {left}"
        time.sleep(0.02)


def wait_for_ranks(folder, num_ranks):
    deadline = time.monotonic() + 20
    while len(list(Path(folder).iterdir())) < num_ranks:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_only_rank_zero_is_heard():
    assert finish(start(2, "fine")) == (0, "out 0\n", "err 0\n")


def test_cores_are_shared_out_unless_the_user_says_otherwise():
    share = max(1, len(os.sched_getaffinity(0)) // 2)
    os.environ.pop("OMP_NUM_THREADS", None)
    assert finish(start(2, "environment"))[1] == f"2 0 {share}\n"
    assert finish(start(2, "environment", OMP_NUM_THREADS="7"))[1] == "2 0 7\n"


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_is_named_with_its_signal(victim):
    code, _, err = finish(start(3, "kill", str(victim)))
    assert code == 1
    words = "last words\n" if victim else ""
    assert err == f"{words}error: rank {victim} of 3 was killed by SIGKILL\n"


def test_the_cause_is_said_once_not_its_consequence():
    code, _, err = finish(start(3, "raise", "2"))
    assert (code, err) == (1, "error: rank 2 of 3: ArithmeticError: no such sum\n")


def test_debugging_shows_the_traceback():
    code, _, err = finish(start(2, "raise", "1", show_traceback=True))
    assert code == 1 and "in do_raise" in err and err.endswith("error: rank 1 of 2: ArithmeticError: no such sum\n")


def test_a_peer_that_hangs_does_not_hold_the_job():
    code, _, err = finish(start(2, "only_lost"))
    assert (code, err) == (1, "error: rank 0 of 2: rank 1 does not answer\n")


def test_wrong_input_is_no_ranks_fault():
    assert finish(start(2, "wrong_input")) == (2, "", "error: no such model\n")


def test_leaving_early_is_a_failure():
    code, _, err = finish(start(2, "leave"))
    assert code == 1 and "rank 1 of 2 left before the work was done" in err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_launcher_ends_all(number, tmp_path):
    launcher = start(2, "sleep", str(tmp_path))
    wait_for_ranks(tmp_path, 2)
    launcher.send_signal(number)
    assert finish(launcher)[0] == 128 + number


def test_ranks_that_ignore_sigterm_are_killed(tmp_path):
    launcher = start(2, "stubborn", str(tmp_path))
    wait_for_ranks(tmp_path, 2)
    launcher.terminate()
    assert finish(launcher)[0] == 128 + signal.SIGTERM


def test_no_rank_outlives_a_killed_launcher(tmp_path):
    launcher = start(2, "stubborn", str(tmp_path))
    wait_for_ranks(tmp_path, 2)
    launcher.kill()
    launcher.wait()
    assert_gone()
