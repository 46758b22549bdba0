"""How a doctor's document reads, for machines that are not at hand."""

import copy

from fastdeploy_fusion import diagnosis
from fastdeploy_fusion.cli import doctor_text
from fastdeploy_fusion.groups import alone

GPU = {"name": "NVIDIA H200", "memory_bytes": 141 << 30, "driver_cuda": "12.8"}


def document(num_ranks=2):
    d = diagnosis.diagnose(alone(0), 64)
    facts = d["ranks"][0]
    facts |= {"device": "gpu:0", "gpu": GPU, "paddle_cuda": "12.6", "num_gpus": 8, "driver": "NVRM version: 570.1"}
    facts["versions"] = {"flashinfer-python": "0.7.4", "torch": "2.9.0"}
    d["ranks"] = [copy.deepcopy(facts) for _ in range(num_ranks)]
    d["num_ranks"], d["auto"], d["peer_access"] = num_ranks, "trtllm", [[True] * num_ranks] * num_ranks
    d["backends"] = [
        {**d["backends"][0], "name": "shm", "usable": False, "reason": "r", "meaning": "m", "action": "a"},
        {
            **d["backends"][0],
            "name": "trtllm",
            "usable": True,
            "tried": True,
            "limit": 256,
            "workspace_bytes": 38 << 20,
            "seconds": 1.5,
        },
    ]
    return d


def test_a_machine_with_gpus():
    text = doctor_text.render(document())
    for words in (
        "gpu:0, NVIDIA H200, 141.0 GiB, driver for CUDA 12.8",
        "flashinfer-python 0.7.4\n",
        "torch 2.9.0\n",
        "peer access       every pair",
        "trtllm (auto)     usable: opened and self-tested on 2 ranks in 1.50 s, fused up to 256 tokens",
        "workspace 38 MiB a rank",
        "shm               no: r\n                  m\n                  -> a\n",
    ):
        assert words in text, words
    assert "rank 1" not in text


def test_what_differs_between_ranks_is_shown():
    d = document(3)
    d["ranks"][2]["paddle"] = "3.4.0"
    d["peer_access"] = [[True, True, False], [True, True, True], [False, True, True]]
    d["num_hosts"] = 2
    text = doctor_text.render(d)
    assert "paddle, rank 2    3.4.0, CUDA 12.6" in text
    assert "missing: 0 -> 2, 2 -> 0" in text and "3 on 2 hosts" in text


def test_a_driver_that_fails_is_no_failure():
    d = document(1)
    d["ranks"][0]["gpu"] = {"error": "cuInit: unknown error (999)"}
    assert "gpu:0: cuInit: unknown error (999)" in doctor_text.render(d)


def test_a_way_out_that_auto_does_not_take():
    d = document()
    d["auto"] = "mnnvl"
    assert doctor_text.render(d).endswith("--flashinfer-allreduce-fusion-backend trtllm\n")


def test_peer_access_is_read_from_the_backends_facts():
    facts = [{"uuid": "a", "peers": ["b"]}, {"uuid": "b", "peers": []}]
    assert diagnosis._peer_access(facts) == [[True, True], [False, True]]
    assert diagnosis._peer_access([{"refusal": "no"}, facts[0]]) is None


def test_nothing_here_raises_without_proc(monkeypatch):
    monkeypatch.setattr(diagnosis, "_lines", lambda path: [])
    facts = diagnosis.machine()
    assert facts["memory"] == {} and facts["driver"] is None
