"""`plan`: every sum of every architecture, from config.json alone, with the reasons that a run would give."""

import json
import re
from pathlib import Path

import pytest

from fastdeploy_fusion import probe, tuned
from fastdeploy_fusion.backends import WorkspacePlan
from fastdeploy_fusion.cli import main, plan_document
from fastdeploy_fusion.config import FusionConfig, ParallelConfig
from fastdeploy_fusion.models import load_config, outline

CONFIGS = Path(__file__).parents[1] / "data/configs"
ON = FusionConfig(enabled=True)


def plan(capfd, *argv):
    assert main(["plan", *map(str, argv)]) == 0
    return capfd.readouterr().out


def plan_json(capfd, *argv):
    return json.loads(plan(capfd, *argv, "--json"))


@pytest.mark.parametrize(
    ("name", "layers", "sums_a_layer"),
    [
        ("configs/glm_4_5_air", 46, 2),
        ("configs/glm_4_5", 92, 2),
        ("configs/deepseek_v3", 61, 2),
        ("qwen3_moe_a", None, 2),
        ("nemotron_h_a", None, 1),
    ],
)
def test_every_sum_of_every_family_is_found_and_taken_by_a_norm(data, name, layers, sums_a_layer):
    config = load_config(data / name)
    layers = layers or config.num_hidden_layers
    steps = outline.trace(config, ParallelConfig(tensor_parallel_size=4), 0, ON, "bfloat16")
    with_norm = [s for s in outline.sums(steps) if s.op == "add_rms_norm"]
    assert len(with_norm) == sums_a_layer * layers
    assert len(outline.sums(steps)) == len(with_norm) + 1  # the embedding's
    assert len({s.site for s in outline.sums(steps)}) == len(outline.sums(steps))
    assert {s.group for s in outline.sums(steps)} == {(0, 1, 2, 3)}
    owed = [s.owes for s in steps if s.owes]
    assert owed == [s.site for s in with_norm], "each sum is taken by the next norm"


def test_unfused_and_alone():
    config = load_config(CONFIGS / "glm_4_5_air")
    unfused = outline.sums(outline.trace(config, ParallelConfig(tensor_parallel_size=2), 0, FusionConfig(), "float32"))
    assert {s.op for s in unfused} == {"all_reduce"} and len(unfused) == 2 * 46 + 1
    assert outline.sums(outline.trace(config, ParallelConfig(), 0, ON, "float32")) == []


def test_a_stage_hands_on_complete_sums():
    config = load_config(CONFIGS / "glm_4_5_air")
    layout = ParallelConfig(tensor_parallel_size=2, pipeline_parallel_size=2)
    first, last = (outline.trace(config, layout, rank, ON, "float32") for rank in (0, 2))
    assert (first[-1].kind, first[-1].op, first[-1].site) == ("boundary", "all_reduce", "model.layers.22.mlp.experts")
    assert last[-1].name == "model.norm" and {s.group for s in outline.sums(last)} == {(2, 3)}
    assert len(outline.sums(first)) + len(outline.sums(last)) == 2 * 46 + 1


def test_planning_takes_no_memory_for_weights():
    """A 700 GB model is outlined; what a process may map is limited to far less."""
    config = load_config(CONFIGS / "deepseek_v3")
    before = mapped_bytes()
    outline.trace(config, ParallelConfig(tensor_parallel_size=2), 1, ON, "bfloat16")
    assert mapped_bytes() - before < 100e6


def mapped_bytes():
    return int(Path("/proc/self/statm").read_text().split()[0]) * 4096


@pytest.mark.parametrize(
    ("argv", "limit", "workspace"),
    [
        (("--gpu", "h200", "--tensor-parallel-size", 4), 256, 4 * 256 * 8192),
        (("--gpu", "h100", "--tensor-parallel-size", 8), 64, 8 * 64 * 8192),
        (("--gpu", "b200", "--tensor-parallel-size", 8), 128, 8 * 128 * 8192),
        (("--gpu", "h200", "--tensor-parallel-size", 4, "--flashinfer-allreduce-fusion-max-tokens", 100), 100, 3276800),
    ],
)
def test_limits_are_the_policys(capfd, argv, limit, workspace):
    document = plan_json(capfd, "--model", CONFIGS / "glm_4_5_air", *argv)
    (group,) = document["groups"]
    assert group["unavailable"] is None and group["num_max_tokens"] == limit
    # Three one-shot buffers of `workspace` bytes and one two-shot buffer, each in whole 2 MiB pages, and flags.
    assert 4 * workspace <= group["workspace_bytes_a_rank"] <= 4 * workspace + 4 * (2 << 20)
    for site in document["sites"]:
        for count, decision in site["paths"].items():
            fits = int(count) <= limit
            assert decision["path"] == ("fused" if fits else "plain")
            assert fits or decision["reason"] == "over the token limit"
    assert document["totals"]["16"]["fused"] == 93 and document["totals"]["8192"]["plain"] == 93
    assert document["totals"]["16"]["bytes"] == 93 * 16 * 8192


def test_refusals_are_the_backends_own(capfd):
    base = ("--model", CONFIGS / "deepseek_v3", "--tensor-parallel-size")
    cases = [
        ((16, "--gpu", "h100"), "on another host"),
        ((4, "--gpu", "a100"), "SM80 is not among the architectures"),
        ((4, "--gpu", "h100", "--gpus-per-host", 2), "on another host"),
        ((4, "--gpu", "h100", "--flashinfer-allreduce-fusion-backend", "mnnvl"), "not built"),
        ((4, "--gpu", "h100", "--flashinfer-allreduce-fusion-backend", "shm"), "serves CPU tensors"),
        ((4, "--flashinfer-allreduce-fusion-backend", "trtllm"), "NVIDIA GPUs only"),
        ((4, "--gpu", "h100", "--flashinfer-allreduce-fusion-backend", "plain"), "asked for"),
    ]
    for argv, words in cases:
        document = plan_json(capfd, *base, *argv)
        (group,) = document["groups"]
        assert words in group["unavailable"], argv
        assert group["workspace_bytes_a_rank"] == 0 and document["totals"]["1"]["fused"] == 0
        assert words in document["sites"][0]["paths"]["1"]["detail"]


@pytest.mark.parametrize(("mode", "path", "op"), [("off", "plain", "all_reduce"), ("auto", "fused", "add_rms_norm")])
def test_off_plans_without_fusion_and_auto_with(capfd, mode, path, op):
    argv = ("--tensor-parallel-size", 4, "--gpu", "h200", "--flashinfer-allreduce-fusion", mode)
    document = plan_json(capfd, "--model", CONFIGS / "glm_4_5_air", *argv)
    last = document["sites"][-1]
    assert (last["paths"]["1"]["path"], last["op"]) == (path, op)
    assert (last["paths"]["1"]["reason"] == "fusion is off") == (mode == "off")


def test_two_groups_on_two_hosts_each_have_one_host(capfd):
    argv = ("--tensor-parallel-size", 4, "--data-parallel-size", 2, "--gpu", "h200", "--gpus-per-host", 4)
    (group,) = plan_json(capfd, "--model", CONFIGS / "glm_4_5_air", *argv)["groups"]
    assert group["unavailable"] is None and group["groups_like_it"] == 2


def test_text_has_the_table_the_reasons_and_a_drawing(capfd):
    text = plan(capfd, "--model", CONFIGS / "glm_4_5_air", "--tensor-parallel-size", 4, "--gpu", "h200")
    assert "46 layers, hidden 4096, bfloat16, on 4 x H200 (SM90), tensor_parallel 4" in text
    assert re.search(r"^44 +model\.layers\.\*\.mlp\.experts +model\.layers\.\*\.input_layernorm", text, re.M)
    assert "fused up to 256 tokens, workspace 38 MiB a rank" in text
    assert "plain at 1024, 2048, 8192 tokens: over the token limit" in text
    drawing = text.partition("layer 1:")[2]
    assert drawing.index("GroupedQueryAttention") < drawing.index("post_attention") < drawing.index("FusedMoE")
    assert drawing.rstrip().endswith("v  to model.layers.2.input_layernorm")
    text = plan(capfd, "--model", CONFIGS / "glm_4_5_air", "--tensor-parallel-size", 4, "--gpu", "h200", "--all-sites")
    assert text.count(".self_attn.o_proj") == 46 + 1 and "GatedMLP" not in text
    text = plan(capfd, "--model", CONFIGS / "glm_4_5_air", "--tensor-parallel-size", 4, "--layer", 0)
    assert "GatedMLP model.layers.0.mlp.down_proj" in text and "hidden, complete" in text


def test_limits_measured_here_are_told_apart(capfd, data, tmp_path, monkeypatch):
    """Up to 4 tokens with the norm and up to 100 alone: between them the sum goes by itself."""
    monkeypatch.setenv("FDFUSION_TUNED_TABLE", str(tmp_path / "t.json"))
    here = probe.rank_facts("shm", ON, WorkspacePlan(2, 64, "float32", 1))["tuned"]["here"]
    case = {**here, "world_size": 2, "hidden_size": 64, "dtype": "float32", "crossed": True, "measured_to": 1000}
    entries = [tuned.Entry(**case, pattern=p, limit=n) for p, n in (("add_rms_norm", 4), ("all_reduce", 100))]
    tuned.write(tmp_path / "t.json", entries)
    argv = ("--model", data / "glm4_moe_a", "--tensor-parallel-size", 2)
    paths = plan_json(capfd, *argv)["sites"][-1]["paths"]
    assert [paths[n]["path"] for n in ("1", "64", "1024")] == ["fused", "summed", "plain"]
    text = plan(capfd, *argv)
    assert "summed at 16, 64 tokens: over the token limit" in text
    assert "plain at 256, 1024, 2048, 8192 tokens: over the token limit" in text


def test_one_rank_has_nothing_to_add_up(capfd):
    text = plan(capfd, "--model", CONFIGS / "glm_4_5_air")
    assert "nothing is added up over ranks" in text


def test_wrong_input_is_one_error(capfd):
    model = ("--model", str(CONFIGS / "glm_4_5_air"))
    for argv, words in [
        ((), "no model"),
        (("--model", "nowhere"), "no config.json there"),
        ((*model, "--tensor-parallel-size", "5"), "tensor_parallel_size 5"),
        ((*model, "--layer", "46"), "layers 0 to 45"),
        ((*model, "--tensor-parallel-size", "2", "--enable-dp-attention"), "does not run with data-parallel attention"),
    ]:
        assert main(["plan", *argv]) == 2
        out, err = capfd.readouterr()
        assert out == "" and err.count("error:") == 1 and words in err, err


def test_made_up_facts_have_what_the_backends_read():
    """Were a backend to look at one more fact, planning would end in a KeyError here."""
    for gpu in ("h100", "b300"):
        document = plan_document.make(
            CONFIGS / "glm_4_5_air/config.json",
            ParallelConfig(tensor_parallel_size=2),
            ON,
            gpu=gpu,
            gpus_per_host=8,
            dtype="bfloat16",
            token_counts=(1,),
        )
        assert document["groups"][0]["unavailable"] is None
