"""Arithmetic of the workspace, the strategy and the refusals: pure, so that all ranks decide alike."""

import copy

import pytest

from fastdeploy_fusion.backends import WorkspacePlan, flashinfer
from fastdeploy_fusion.backends.flashinfer import mnnvl, sizes

MIB = 1 << 20
PLAN = WorkspacePlan(2, 4096, "bfloat16", 2048)


def facts(count=2):
    names = [f"gpu{i}" for i in range(count)]
    return [
        {
            "refusal": None, "host": "h", "sm": 90, "way": "torch", "flashinfer": "0.6.18", "api": "unified",
            "uuid": name, "visible": names, "peers": [other for other in names if other != name],
        }
        for name in names
    ]  # fmt: skip


def test_bytes_are_whole_granules_of_the_three_buffers():
    # 2 ranks x 2048 x 4096 x 2 bytes = 32 MiB; the pad of 2 KiB takes each buffer into one more granule of 2 MiB.
    assert sizes.buffer_bytes(PLAN) == (32 * MIB, 2 * 256 * 4, 3 * 32 * MIB)
    assert flashinfer.workspace_bytes(PLAN) == (34 + 2 + 98) * MIB
    assert sizes.workspace_bytes(PLAN, pad=0) == (32 + 2 + 96) * MIB


def test_float32_buffers():
    plan = WorkspacePlan(2, 4096, "float32", 2048)
    assert sizes.buffer_bytes(plan)[::2] == (32 * MIB, 3 * 64 * MIB)
    assert sizes.buffer_bytes(plan, wide_float32=True)[::2] == (64 * MIB, 3 * 64 * MIB)


def test_strategy():
    def choose(tokens, world_size, hidden=4096, dtype="bfloat16"):
        return sizes.use_oneshot(tokens, hidden, dtype, world_size)

    assert all(choose(tokens, 2) for tokens in (1, 2048, 16384))
    assert [choose(tokens, 4) for tokens in (1024, 1025)] == [True, False]
    assert [choose(tokens, 8) for tokens in (336, 337)] == [True, False]
    # Two-shot has no kernel for fewer tokens than ranks, however large the row.
    assert choose(16, 16, hidden=65536 * 16)
    assert choose(8, 8, hidden=1 << 20)


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (WorkspacePlan(3, 4096, "bfloat16", 8), r"3 ranks: .*\(2, 4, 8, 16\)"),
        (WorkspacePlan(2, 4100, "bfloat16", 8), "multiple of 8"),
        (WorkspacePlan(2, 4098, "float32", 8), "multiple of 4"),
        (WorkspacePlan(2, 8 * 1031, "float16", 8), "1024 threads"),
        (WorkspacePlan(2, 4096, "bfloat16", 65536), "at most 65535"),
        (WorkspacePlan(8, 8192, "float16", 8192), "at most 8191"),
    ],
)
def test_plans_that_no_kernel_serves(plan, words):
    with pytest.raises(AssertionError, match=words):
        raise AssertionError(flashinfer.refuse(facts(plan.world_size), plan))


@pytest.mark.parametrize("hidden", [512, 2048, 2880, 4096, 5120, 6144, 7168, 8192, 12288, 16384])
def test_usual_hidden_sizes_are_served(hidden):
    assert flashinfer.refuse(facts(), WorkspacePlan(2, hidden, "bfloat16", 2048)) is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"refusal": "no driver"}, "rank 1: no driver"),
        ({"sm": 80}, "rank 1: SM80 is not among .*SM90"),
        ({"sm": 100}, "sm is 90 on rank 0 and 100 on rank 1"),
        ({"flashinfer": "0.6.12"}, "flashinfer is 0.6.18 on rank 0 and 0.6.12 on rank 1"),
        ({"way": "proxy"}, "way is torch on rank 0 and proxy on rank 1"),
        ({"host": "other"}, "rank 1 is on another host"),
        ({"uuid": "gpu0"}, "ranks 0 and 1 are on the same GPU"),
        ({"visible": ["gpu1"]}, "rank 1 does not see rank 0's GPU; leave CUDA_VISIBLE_DEVICES"),
        ({"peers": []}, r"rank 1's GPU cannot map the memory of rank 0's \(no peer access\)"),
    ],
)
def test_facts_that_refuse(change, words):
    given = facts()
    given[1] |= change
    before = copy.deepcopy(given)
    with pytest.raises(AssertionError, match=words):
        raise AssertionError(flashinfer.refuse(given, PLAN))
    assert given == before


def test_peer_access_is_asked_of_every_ordered_pair():
    given = facts(4)
    given[2]["peers"].remove("gpu3")
    assert "rank 2's GPU cannot map the memory of rank 3's" in flashinfer.refuse(
        given, WorkspacePlan(4, 4096, "float16", 8)
    )


def test_a_cpu_rank_says_why_it_cannot():
    fact = flashinfer.probe("cpu")
    assert "NVIDIA GPUs only" in fact["refusal"]
    assert flashinfer.refuse([fact, fact], PLAN).startswith("rank 0: ")


def test_a_gpu_rank_without_a_driver_says_so():
    pytest.importorskip("paddle")
    fact = flashinfer.probe("gpu:0")
    assert fact["refusal"] is None or "driver" in fact["refusal"] or "FlashInfer" in fact["refusal"]


def test_mnnvl_is_refused_by_name():
    fact = mnnvl.probe("gpu:0")
    assert "mnnvl" in mnnvl.refuse([fact], PLAN)
