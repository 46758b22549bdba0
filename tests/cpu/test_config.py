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
