"""docs/plans.md: plans of real models on real GPUs, as `plan` makes them, and the limit table that they come from."""

from pathlib import Path

import pytest

from fastdeploy_fusion.cli import plan_document, plan_text
from fastdeploy_fusion.config import FusionConfig, ParallelConfig
from fastdeploy_fusion.hardware import COMPUTE_CAPABILITIES
from fastdeploy_fusion.policy import LIMIT_BYTES, MIB
from tests.generated_docs import check

CONFIGS = Path(__file__).parents[1] / "data/configs"
MODELS = {"GLM-4.5-Air": "glm_4_5_air", "GLM-4.5": "glm_4_5", "DeepSeek-V3": "deepseek_v3"}
GPUS = ("h100", "h200", "b200")
SIZES = (2, 4, 8)
TOKENS = (1, 16, 64, 256, 1024, 2048, 8192)
VLLM = "vLLM"
BOTH = "vLLM; TensorRT-LLM has 256 and 64 tokens at hidden 4096 for 4 and 8 ranks"
SOURCES = {
    (90, 2): "measured (benchmarks.md); vLLM has 64 MiB, TensorRT-LLM 8 MiB (1,024 tokens at hidden 4096)",
    (90, 4): BOTH,
    (90, 8): BOTH,
    **{(sm, ranks): VLLM for sm in (100, 103) for ranks in SIZES},
}


def plan(name: str, gpu: str, ranks: int) -> dict:
    return plan_document.make(
        CONFIGS / MODELS[name] / "config.json",
        ParallelConfig(tensor_parallel_size=ranks),
        FusionConfig(enabled=True),
        gpu=gpu,
        gpus_per_host=8,
        dtype="bfloat16",
        token_counts=TOKENS,
    )


@pytest.fixture(scope="module")
def plans():
    return {(m, g, n): plan(m, g, n) for m in MODELS for g in GPUS for n in SIZES}


def page(plans: dict) -> str:
    lines = []
    for name in MODELS:
        first = plans[name, GPUS[0], SIZES[0]]
        sums = first["totals"]["1"]["sums"]
        lines += [
            f"## {name}",
            "",
            f"{first['num_layers']} layers, hidden {first['hidden_size']}, bfloat16: {sums} sums a forward, of which "
            f"{first['totals']['1']['fused_with_norm']} are taken by a norm and one is the embedding's; "
            f"{first['sites'][0]['bytes_a_token']:,} bytes a token each.",
            "",
            "| GPU | ranks | fused up to, tokens | workspace a rank | " + " | ".join(f"{n:,}" for n in TOKENS) + " |",
            "|---|---|---|---|" + "---|" * len(TOKENS),
        ]
        for gpu in GPUS:
            for ranks in SIZES:
                document = plans[name, gpu, ranks]
                (group,) = document["groups"]
                fused = [document["totals"][str(n)]["fused"] for n in TOKENS]
                size = group["workspace_bytes_a_rank"] / MIB
                cells = [gpu.upper(), ranks, f"{group['num_max_tokens']:,}", f"{size:,.0f} MiB", *fused]
                lines.append(f"| {' | '.join(map(str, cells))} |")
        lines.append("")
    drawing = "\n".join(plan_text.draw_layer(plans["DeepSeek-V3", "h200", 8]))
    lines += ["## One layer of DeepSeek-V3 on 8 ranks", "", "```", drawing, "```"]
    return "\n".join(lines)


def limits() -> str:
    lines = ["| GPUs | SM | ranks | limit | source |", "|---|---|---|---|---|"]
    for (sm, ranks), size in LIMIT_BYTES.items():
        names = " ".join(name.upper() for name, its_sm in COMPUTE_CAPABILITIES.items() if its_sm == sm)
        lines.append(f"| {names} | {sm} | {ranks} | {size / MIB:g} MiB | {SOURCES[sm, ranks]} |")
    return "\n".join(lines)


def test_every_limit_has_a_source():
    assert set(SOURCES) == set(LIMIT_BYTES)


def test_limits_and_paths_follow_from_the_table(plans):
    for (_, gpu, ranks), document in plans.items():
        (group,) = document["groups"]
        row = document["hidden_size"] * 2
        assert group["num_max_tokens"] == LIMIT_BYTES[COMPUTE_CAPABILITIES[gpu], ranks] // row
        for count, total in document["totals"].items():
            expected = total["sums"] if int(count) <= group["num_max_tokens"] else 0
            assert total["fused"] == expected == total["sums"] - total["plain"]
        assert document["totals"]["1"]["fused_with_norm"] == 2 * document["num_layers"]


def test_the_page_is_as_the_plans(plans):
    check("plans.md", "tests/cpu/test_plans_page.py", page(plans))


def test_the_limits_are_as_the_policy():
    check("plans.md", "limits of tests/cpu/test_plans_page.py", limits())
