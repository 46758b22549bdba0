"""Prefix marks: behaviour in the prefix, never in the weight's name."""

import pytest

from fastdeploy_fusion.sites import Site, fusable, parse_site

NAME = "model.layers.3.self_attn.o_proj"


def test_a_mark_is_put_in_and_taken_out():
    assert fusable(NAME) == "model.layers.3.self_attn.enable_all_reduce_fusion.o_proj"
    assert parse_site(fusable(NAME)) == Site(NAME, marked=True)
    assert parse_site(NAME) == Site(NAME, marked=False)


def test_marking_twice_changes_nothing():
    assert fusable(fusable(NAME)) == fusable(NAME)


def test_the_older_spelling_is_accepted():
    assert parse_site("model.layers.3.self_attn.enable_all_reduce.o_proj") == Site(NAME, marked=True)


def test_a_name_without_a_parent():
    assert parse_site(fusable("norm")) == Site("norm", marked=True)


@pytest.mark.parametrize("prefix", ["model.enable_all_reduce_fusions.o_proj", "model.my_enable_all_reduce.o_proj"])
def test_only_whole_segments_are_marks(prefix):
    assert parse_site(prefix) == Site(prefix, marked=False)
