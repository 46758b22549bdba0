"""Fusable sites, told by prefix: which sums may be left to the next norm.

FastDeploy marks such a layer by a segment in its prefix. The mark is for behaviour only; weight keys, quantisation
patterns and layer ids must see the prefix without it. One function takes the two apart.
"""

from dataclasses import dataclass

MARKERS = ("enable_all_reduce_fusion", "enable_all_reduce")
"""The marker segments that FastDeploy's models use, the current spelling first."""


@dataclass(frozen=True)
class Site:
    """``weight_prefix``: the name that checkpoints know. ``marked``: the sum of this site may be fused."""

    weight_prefix: str
    marked: bool


def fusable(prefix: str) -> str:
    """Mark a site: ``model.layers.3.self_attn.o_proj`` -> ``model.layers.3.self_attn.enable_all_reduce_fusion.o_proj``.

    Marking twice changes nothing.
    """
    if parse_site(prefix).marked:
        return prefix
    parent, _, name = prefix.rpartition(".")
    return ".".join(part for part in (parent, MARKERS[0], name) if part)


def parse_site(prefix: str) -> Site:
    """Take a prefix apart into the name in the checkpoint and the mark. Both marker spellings are accepted."""
    segments = prefix.split(".")
    kept = [segment for segment in segments if segment not in MARKERS]
    return Site(weight_prefix=".".join(kept), marked=len(kept) != len(segments))
