"""`tune` on real ranks: the table that it writes, and what `open()` makes of tables that differ from rank to rank."""

import json
import os
import subprocess
import sys

import pytest

from fastdeploy_fusion import tuned
from fastdeploy_fusion.backends.shm import NUM_MAX_TOKENS
from tests.ranks import run_cases

CASES = ("same", "ranks differ", "only rank 1", "other version", "flag")


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("tables"))
    found = run_cases(2, [("tests.multi.tune_bodies:limits", folder, case) for case in CASES])
    return dict(zip(CASES, found, strict=True))


@pytest.mark.parametrize("case", CASES)
def test_all_ranks_come_to_the_same_limits(opened, case):
    first, second = opened[case]
    assert first["limits"] == second["limits"] and first["paths"] == second["paths"]
    assert second["log"] == []


def test_a_table_sets_the_limits(opened):
    assert opened["same"][0] == {"limits": [5000, 30], "paths": ["fused", "plain"], "log": []}


def test_rank_0s_table_is_used_where_they_differ(opened):
    first = opened["ranks differ"][0]
    assert first["limits"] == [5000, 30]
    assert len(first["log"]) == 1 and "all ranks use rank 0's" in first["log"][0]


def test_a_table_that_rank_0_has_not_is_not_used(opened):
    first = opened["only rank 1"][0]
    assert first["limits"] == [NUM_MAX_TOKENS, NUM_MAX_TOKENS] and "rank 1 has another tuned table" in first["log"][0]


def test_a_table_of_another_version_is_refused_with_the_reason(opened):
    first = opened["other version"][0]
    assert first["limits"] == [NUM_MAX_TOKENS, NUM_MAX_TOKENS]
    assert "is not used: it was measured with backend version 'another', and here it is '2'" in first["log"][0]


def test_the_users_flag_comes_first(opened):
    assert opened["flag"][0] == {"limits": [9, 9], "paths": ["plain", "plain"], "log": []}


def run_tune(*argv, **environment):
    return subprocess.run(
        [sys.executable, "-m", "fastdeploy_fusion", "tune", *argv],
        env={**os.environ, **environment}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip


def test_from_the_shell(tmp_path):
    path, picture = tmp_path / "t.json", tmp_path / "t.png"
    done = run_tune(
        "--hidden", "64", "--max-tokens", "5", "--seconds", "0.05", "--pattern", "add_rms_norm",
        "--plot", str(picture), FDFUSION_TUNED_TABLE=str(path),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (entry,) = tuned.read(path)
    assert (entry.world_size, entry.hidden_size, entry.dtype, entry.backend) == (2, 64, "float32", "shm")
    assert [row["tokens"] for row in entry.curve][:1] == [1] and 0 <= entry.limit <= 5
    assert {side for row in entry.curve for side in row["us"]} == {"fused", "pure", "plain"}
    assert "| tokens | fused, us | pure, us | plain, us | fastest | flat (2048)" in done.stdout
    assert f"The table is {path}." in done.stdout
    assert picture.read_bytes()[:4] == b"\x89PNG"
    again = run_tune("--show", str(path))
    assert again.returncode == 0 and again.stdout.strip() in done.stdout
    json.loads(path.read_text())


@pytest.mark.parametrize(
    ("argv", "environment", "message"),
    [
        (["--tensor-parallel-size", "1", "--output", "t.json"], {}, "one rank has nothing to add up"),
        ([], {"FDFUSION_TUNED_TABLE": "off"}, "there is no place for the table"),
        (["--output", "/"], {}, "is a folder"),
        (["--show", "/nowhere.json"], {}, "--show /nowhere.json"),
    ],
)
def test_wrong_input_is_one_line(argv, environment, message):
    done = run_tune(*argv, **environment)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and message in done.stderr
