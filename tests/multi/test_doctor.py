"""`doctor` on this machine: one rank, its own ranks, a launcher's ranks, and with a backend that fails."""

import json
import os
import subprocess
import sys

import pytest

from fastdeploy_fusion.backends.shm import NUM_MAX_TOKENS
from fastdeploy_fusion.launch import free_endpoints, rank_environment

DOCTOR = (sys.executable, "-m", "fastdeploy_fusion", "doctor")


def doctor(*argv, env=None):
    """(exit code, stdout, stderr)"""
    done = subprocess.run(
        [*DOCTOR, *map(str, argv)], text=True, capture_output=True, timeout=100, env={**os.environ, **(env or {})}
    )
    return done.returncode, done.stdout, done.stderr


def verdicts(document):
    return {verdict["name"]: verdict for verdict in document["backends"]}


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_shared_memory_is_usable_here(ranks):
    code, out, err = doctor("--ranks", ranks, "--json", "--hidden-size", 64)
    assert (code, err, out.count("\n")) == (0, "", 1)
    document = json.loads(out)
    assert document["num_ranks"] == len(document["ranks"]) == ranks and document["num_hosts"] == 1
    assert document["usable"] and document["auto"] == "shm" and document["peer_access"] is None
    by_name = verdicts(document)
    assert set(by_name) == {"shm", "trtllm", "mnnvl"}
    shm = by_name["shm"]
    assert shm["usable"] and shm["tried"] == (ranks > 1) and shm["reason"] is None
    assert (shm["limit"], shm["workspace_bytes"] is not None) == (
        (NUM_MAX_TOKENS, True) if ranks > 1 else (None, False)
    )
    trtllm = by_name["trtllm"]
    assert not trtllm["usable"] and "NVIDIA GPUs only" in trtllm["reason"] and "`shm`" in trtllm["action"]
    facts = document["ranks"][-1]
    assert facts["device"] == "cpu" and facts["memory"]["total"] >= facts["memory"]["available"] > 0


def test_text_for_people():
    code, out, err = doctor("--ranks", 2)
    assert (code, err) == (0, "")
    for words in ("shm (auto)", "opened and self-tested on 2 ranks", "-> ", "peer access       no GPUs"):
        assert words in out
    assert out.endswith("Fusion works here: give --enable-flashinfer-allreduce-fusion.\n")


@pytest.mark.parametrize("ranks", [1, 2])
def test_rows_that_the_policy_refuses_are_not_called_usable(ranks):
    code, out, err = doctor("--ranks", ranks, "--json", "--hidden-size", 3)
    shm = verdicts(json.loads(out))["shm"]
    assert (code, err, shm["usable"]) == (1, "", False)
    assert shm["reason"] == "row is not a multiple of 16 bytes (3 x float32 = 12 bytes)" and "Pad" in shm["action"]


def test_exit_1_when_nothing_is_usable():
    env = {"FDFUSION_FAULT": "create:1:raise"}
    code, out, err = doctor("--ranks", 2, "--json", env=env)
    assert (code, err) == (1, "")
    document = json.loads(out)
    assert not document["usable"]
    shm = verdicts(document)["shm"]
    assert "create failed" in shm["reason"] and "rank 1" in shm["reason"] and shm["action"]
    assert document["ranks"][0]["environment"]["FDFUSION_FAULT"] == env["FDFUSION_FAULT"]
    code, out, _ = doctor("--ranks", 2, env=env)
    assert code == 1 and "No fused backend can be used here" in out


def test_exit_2_when_a_rank_is_lost():
    code, out, err = doctor("--ranks", 2, "--json", env={"FDFUSION_FAULT": "create:1:kill"})
    assert (code, out) == (2, "")
    assert err.count("error:") == 1 and "rank 1" in err


def test_exit_2_for_wrong_flags():
    assert doctor("--ranks", 0)[0] == 2
    assert doctor("--rank", 2)[0] == 2


def test_a_launchers_ranks_are_used():
    endpoints = free_endpoints(2)
    ranks = [
        subprocess.Popen([*DOCTOR, "--json"], env=rank_environment(rank, endpoints), text=True, stdout=subprocess.PIPE)
        for rank in range(2)
    ]
    outs = [rank.communicate(timeout=100)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0]
    assert outs[1] == "" and json.loads(outs[0])["num_ranks"] == 2
