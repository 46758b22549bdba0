"""The table of measured limits: what is taken from it, and why it is refused."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from fastdeploy_fusion import tuned
from fastdeploy_fusion.backends import WorkspacePlan
from fastdeploy_fusion.config import FusionConfig
from fastdeploy_fusion.opening import token_limits
from fastdeploy_fusion.policy import GroupState, Op, Reason, Request, decide, limit_tokens
from fastdeploy_fusion.policy import Path as Route

HERE = tuned.conditions("NVIDIA H200, SM90", "trtllm", "0.6.12 (torch)", "3.3.1")
ENTRY = tuned.Entry(
    **HERE, world_size=2, hidden_size=4096, dtype="bfloat16", pattern="add_rms_norm", limit=3500, crossed=True,
    measured_to=16384,
)  # fmt: skip
PLAN = WorkspacePlan(2, 4096, "bfloat16", 1)
ON = FusionConfig(enabled=True)


@pytest.fixture
def path(tmp_path, monkeypatch):
    monkeypatch.setenv("FDFUSION_TUNED_TABLE", str(tmp_path / "folder" / "tuned.json"))
    return tmp_path / "folder" / "tuned.json"


class TestFile:
    def test_written_and_read(self, path):
        tuned.write(path, [ENTRY])
        assert tuned.read(path) == [ENTRY]
        assert [p.name for p in path.parent.iterdir()] == ["tuned.json"]

    def test_a_newer_measurement_replaces_its_case_and_no_other(self, path):
        other = replace(ENTRY, hidden_size=2048, limit=2500)
        tuned.write(path, [ENTRY, other])
        tuned.write(path, [replace(ENTRY, limit=3000)])
        assert [(e.hidden_size, e.limit) for e in tuned.read(path)] == [(2048, 2500), (4096, 3000)]

    def test_where_it_is(self, monkeypatch):
        monkeypatch.setenv("FDFUSION_TUNED_TABLE", "off")
        assert tuned.table_path() is None
        monkeypatch.setenv("FDFUSION_TUNED_TABLE", "")
        monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
        assert tuned.table_path() == Path("/somewhere/fastdeploy_fusion/tuned.json")
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.setenv("HOME", "/home/me")
        assert tuned.table_path() == Path("/home/me/.cache/fastdeploy_fusion/tuned.json")


class TestRefusal:
    def test_no_table_is_nothing_to_talk_about(self, path):
        view = tuned.rank_view(HERE)
        assert (view["limits"], view["refusal"], tuned.notes([view, view])) == ([], None, [])

    @pytest.mark.parametrize(
        ("changed", "reason"),
        [
            (
                {"device": "NVIDIA B200, SM100"},
                "with device 'NVIDIA B200, SM100', and here it is 'NVIDIA H200",
            ),
            ({"backend_version": "0.5.0 (torch)"}, "measured with backend version '0.5.0 (torch)'"),
            ({"paddle": "3.2.2"}, "measured with paddle '3.2.2'"),
            ({"backend": "shm"}, "it holds nothing for the trtllm backend"),
        ],
    )
    def test_measured_on_something_else(self, path, changed, reason):
        tuned.write(path, [replace(ENTRY, **changed)])
        view = tuned.rank_view(HERE)
        assert view["limits"] == [] and reason in view["refusal"]
        assert tuned.notes([view]) == [f"tuned table {path} is not used: {view['refusal']}"]

    @pytest.mark.parametrize(
        ("content", "reason"),
        [
            ("not json", "JSONDecodeError"),
            ("[]", "it is not a tuned table"),
            (json.dumps({"format": tuned.FORMAT + 1, "entries": []}), "format version is 2 and this library reads 1"),
            (json.dumps({"format": tuned.FORMAT}), "it is damaged: KeyError"),
            (json.dumps({"format": tuned.FORMAT, "entries": [{"limit": 3}]}), "it is damaged: TypeError"),
        ],
    )
    def test_not_a_table_of_this_version(self, path, content, reason):
        path.parent.mkdir()
        path.write_text(content)
        assert reason in tuned.rank_view(HERE)["refusal"]

    def test_of_a_file_that_cannot_be_read(self, path):
        path.mkdir(parents=True)
        assert "IsADirectoryError" in tuned.rank_view(HERE)["refusal"]


class TestAgreement:
    def view(self, limit=3500, **here):
        view = tuned.no_view(None, {**HERE, **here})
        return {**view, "limits": [[2, 4096, "bfloat16", "add_rms_norm", limit, True]], "source": "t.json"}

    def test_rank_0s_table_is_everybodys(self):
        views = [self.view(3500), self.view(99), tuned.no_view(None, HERE)]
        assert tuned.agree(views) == views[0]
        assert tuned.notes(views) == [
            "rank 1 has another tuned table (t.json); all ranks use rank 0's",
            "rank 2 has another tuned table (none); all ranks use rank 0's",
        ]

    def test_a_rank_on_another_device_refuses_it_for_all(self):
        views = [self.view(), self.view(device="NVIDIA H100, SM90")]
        assert tuned.agree(views)["limits"] == []
        assert "device is 'NVIDIA H200, SM90' on rank 0 and 'NVIDIA H100, SM90' on rank 1" in tuned.notes(views)[0]

    def test_a_table_that_only_another_rank_has_is_not_used(self):
        assert tuned.agree([tuned.no_view(None, HERE), self.view()])["limits"] == []


class TestLimits:
    def view(self, *limits):
        return {**tuned.no_view(None, HERE), "limits": [[2, 4096, "bfloat16", *limit, True] for limit in limits]}

    def test_the_order(self):
        assert limit_tokens(replace(ON, num_max_tokens=7), 90, 2, 4096, "bfloat16", tuned=(3500, True)) == 7
        assert limit_tokens(ON, 90, 2, 4096, "bfloat16", tuned=(3500, True)) == 3500
        assert limit_tokens(ON, 90, 2, 4096, "bfloat16") == 2048
        assert limit_tokens(ON, 90, 8, 4096, "bfloat16", tuned=(0, True)) == 0
        assert limit_tokens(ON, None, 2, 4096, "float32") == 2048

    def test_a_measurement_that_ended_before_the_crossing_lowers_no_limit(self):
        assert limit_tokens(ON, 90, 2, 4096, "bfloat16", tuned=(512, False)) == 2048
        assert limit_tokens(ON, 90, 2, 4096, "bfloat16", tuned=(16384, False)) == 16384
        assert limit_tokens(ON, None, 2, 4096, "float32", tuned=(512, False), default=1 << 20) == 1 << 20

    def test_each_pattern_has_its_own(self):
        view = self.view(("add_rms_norm", 3500), ("all_reduce", 3000))
        assert token_limits("trtllm", ON, PLAN, 90, view) == (3500, 3000)
        assert token_limits("trtllm", ON, PLAN, 90, self.view(("add_rms_norm", 3500))) == (3500, 3500)

    @pytest.mark.parametrize("changed", [{"world_size": 4}, {"hidden_size": 5120}, {"dtype": "float16"}])
    def test_another_case_is_not_guessed(self, changed):
        plan = replace(PLAN, **changed)
        assert token_limits("trtllm", ON, plan, None, self.view(("add_rms_norm", 3500))) == (2048, 2048)

    def test_decide_takes_the_limit_of_the_pattern(self):
        state = GroupState(2, None, "shm", 4096, 100, all_reduce_max_tokens=10)
        ask = lambda op, tokens: decide(Request(op, (tokens, 4096), "float32", "float32"), state, ON)  # noqa: E731
        assert ask(Op.ADD_RMS_NORM, 50).path is Route.FUSED
        assert ask(Op.ALL_REDUCE, 50).reason is Reason.TOKEN_LIMIT
        assert ask(Op.ALL_REDUCE, 10).path is Route.FUSED
