"""Settings and flags: defaults in one place, wrong values refused with the rule."""

import argparse
import dataclasses

import pytest

from fastdeploy_fusion.config import FusionConfig, ParallelConfig, add_fusion_args, add_parallel_args


def parse(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_fusion_args(parser)
    add_parallel_args(parser)
    return parser.parse_args(argv)


def test_flags_default_to_the_dataclass_defaults():
    args = parse()
    assert FusionConfig.from_args(args) == FusionConfig()
    assert ParallelConfig.from_args(args) == ParallelConfig()
    assert not FusionConfig().enabled


def test_flags_are_read():
    args = parse(
        "--enable-flashinfer-allreduce-fusion",
        "--flashinfer-allreduce-fusion-backend=shm",
        "--flashinfer-allreduce-fusion-max-tokens=7",
        "--tensor-parallel-size=4",
    )
    assert FusionConfig.from_args(args) == FusionConfig(enabled=True, backend="shm", num_max_tokens=7)
    assert ParallelConfig.from_args(args).tensor_parallel_size == 4


FLAG = ["--enable-flashinfer-allreduce-fusion"]


@pytest.mark.parametrize(
    ("argv", "enabled", "auto", "decided_by"),
    [
        ([], False, False, "the default"),
        (FLAG, True, False, "--enable-flashinfer-allreduce-fusion"),
        (["--flashinfer-allreduce-fusion=on"], True, False, "--flashinfer-allreduce-fusion on"),
        (["--flashinfer-allreduce-fusion=off"], False, False, "--flashinfer-allreduce-fusion off"),
        (["--flashinfer-allreduce-fusion", "off", *FLAG], False, False, "--flashinfer-allreduce-fusion off"),
        (["--flashinfer-allreduce-fusion=auto"], False, True, "--flashinfer-allreduce-fusion auto"),
        ([*FLAG, "--flashinfer-allreduce-fusion=auto"], True, False, "--enable-flashinfer-allreduce-fusion"),
    ],
)
def test_off_beats_on_and_on_beats_auto(argv, enabled, auto, decided_by):
    config = FusionConfig.from_args(parse(*argv))
    assert (config.enabled, config.auto, config.decided_by) == (enabled, auto, decided_by)


def test_an_unknown_mode_names_the_choices(capsys):
    with pytest.raises(SystemExit):
        parse("--flashinfer-allreduce-fusion=maybe")
    assert "invalid choice: 'maybe'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("architecture", "ranks", "enabled", "why"),
    [
        ("A", 2, True, "auto: A on 2 tensor-parallel ranks"),
        ("A", 1, False, "auto: A on 1 tensor-parallel rank has no sums"),
        ("B", 2, False, "auto: B is not among A, C"),
    ],
)
def test_auto_is_settled_by_architecture_and_ranks(architecture, ranks, enabled, why):
    settled = FusionConfig(auto=True, backend="shm").settle(architecture, {"A", "C"}, ranks)
    assert (settled.enabled, settled.auto, settled.backend, settled.decided_by) == (enabled, False, "shm", why)
    for fixed in (FusionConfig(enabled=True), FusionConfig()):
        assert fixed.settle(architecture, {"A"}, ranks) is fixed


def test_auto_and_enabled_exclude_each_other():
    with pytest.raises(ValueError, match="auto means that enabled is not decided"):
        FusionConfig(enabled=True, auto=True)


@pytest.mark.parametrize("limit", ["0", "-1", "many", "1.5", ""])
def test_a_limit_that_is_no_positive_number_is_refused(limit, capsys):
    with pytest.raises(SystemExit):
        parse(f"--flashinfer-allreduce-fusion-max-tokens={limit}")
    assert "whole number of at least 1" in capsys.readouterr().err


@pytest.mark.parametrize("value", [0, -1, True, 2.0, "8"])
def test_the_dataclass_checks_too(value):
    with pytest.raises(ValueError, match="num_max_tokens is .*at least 1"):
        FusionConfig(num_max_tokens=value)


def test_unknown_backend_names_the_choices():
    with pytest.raises(ValueError, match="backend is 'nccl'; choose one of auto, trtllm, mnnvl, shm, plain"):
        FusionConfig(backend="nccl")


def test_unknown_keys_raise_and_name_the_known_ones():
    with pytest.raises(ValueError, match="unknown setting max_token_num .*num_max_tokens"):
        FusionConfig.from_dict({"max_token_num": 5})


def test_config_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        FusionConfig().enabled = True
