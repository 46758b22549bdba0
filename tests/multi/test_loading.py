"""Loading on two ranks: each reads its own part, and a checkpoint that one rank can't read stops both."""

import json
import shutil
from pathlib import Path

import pytest

from tests.ranks import run_cases, run_ranks

DATA = Path(__file__).resolve().parents[1] / "data"


def load_or_error(rank, num_ranks, folders):
    """What loading ``folders[rank]`` gives this rank: bytes read, or the error's text."""
    from fastdeploy_fusion import AllReduceFusion
    from fastdeploy_fusion.errors import CheckpointError
    from fastdeploy_fusion.models import load_model

    with AllReduceFusion.open(hidden_size=64) as tp:
        try:
            return load_model(folders[rank], tp).load_summary.num_bytes
        except CheckpointError as error:
            return str(error)


@pytest.fixture
def folders(tmp_path):
    """One whole copy, and one whose second file is cut."""
    made = [tmp_path / name for name in ("whole", "cut")]
    for folder in made:
        shutil.copytree(DATA / "glm4_moe_a", folder)
    file = made[1] / "model-00002-of-00002.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    return [str(folder) for folder in made]


def test_a_rank_reads_half_and_one_ranks_damage_is_every_ranks_error(folders):
    whole, cut = folders
    cases = [(load_or_error, [whole, whole]), (load_or_error, [whole, cut]), (load_or_error, [cut, whole])]
    halves, second, first = run_cases(2, cases, timeout_s=60)
    total = json.loads((DATA / "glm4_moe_a" / "model.safetensors.index.json").read_text())["metadata"]["total_size"]
    # Norms and routers are on both ranks, everything else is on one.
    assert all(0.5 * total < num_bytes < 0.52 * total for num_bytes in halves), (halves, total)
    assert "failed on rank 1" in second[0] and "00002-of-00002.safetensors (" in second[0]
    assert "failed on rank 0" in first[1] and "00002-of-00002.safetensors (" in first[1]
    for own in (second[1], first[0]):
        assert "can't read the checkpoint" in own


def disagree(rank, num_ranks):
    from fastdeploy_fusion import AllReduceFusion
    from fastdeploy_fusion.errors import FusionError
    from fastdeploy_fusion.models import generate, load_model

    with AllReduceFusion.open(hidden_size=64) as tp:
        model = load_model(DATA / "glm4_moe_a", tp, progress=False)
        try:
            generate(model, tp, [[5, 6 + rank]])
        except FusionError as error:
            return str(error)
    return "no error"


def test_ranks_with_different_prompts_are_told_so():
    for text in run_ranks(2, disagree):
        assert text.startswith("generate: ") and "must bring the same" in text
