"""Loading: compare what layers need with what a checkpoint holds, then read this rank's slices.

Nothing is read before everything is accounted for: each stored tensor is needed or skipped by a named rule, and each
needed one is stored, in the right shape and in a dtype that is known.
"""

import difflib
import logging
import re
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from .checkpoint import ITEMSIZE, Reader, StoredTensor, scan
from .errors import CheckpointError
from .layers.parameter import Index, TensorSpec, write_parameter

if TYPE_CHECKING:
    from .groups import RankGroup

NUM_LISTED = 12
"""Differences of a kind that an error spells out; the rest is counted."""

NUM_CANDIDATES = 400
LOAD_TIMEOUT_S = 600.0
"""How much later than its peers a rank may finish reading; a rank that dies is noticed at once."""

_log = logging.getLogger(__name__)
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


@dataclass(frozen=True)
class LoadSummary:
    """``num_loaded``: tensors read, wholly or in part, by this rank. ``skipped``: count of each rule. ``num_bytes``:
    what this rank read. ``notes``: what a user should know."""

    num_loaded: int
    num_bytes: int
    seconds: float
    skipped: dict[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def load_weights(
    specs: Sequence[TensorSpec],
    model_dir: str | Path,
    *,
    group: "RankGroup",
    num_hidden_layers: int,
    tied_head: str | None = None,
    progress: bool = True,
) -> LoadSummary:
    """Fill the parameters of ``specs`` from the safetensors files of ``model_dir``. Collective over ``group``.

    Args:
        specs: ``model.checkpoint_tensors()``.
        num_hidden_layers: tensors of layers from this index on (multi-token prediction) are skipped and counted.
        tied_head: name of the head's weight when the config ties it to the embedding; a stored one is then skipped.
        progress: show a bar on rank 0's stderr.

    Peak memory above the parameters is some 25 MB.

    Raises:
        CheckpointError: on every rank, before anything is read: unreadable files, or the list of all missing,
            unexpected and misshapen tensors.
    """
    started = time.monotonic()
    with _AllOrNone(group, "checking the checkpoint"):
        stored = scan(Path(model_dir))
        kept, skipped = _apply_rules(stored, num_hidden_layers, tied_head)
        _compare(specs, kept, tied_head)
    with _AllOrNone(group, "reading the checkpoint"):
        num_loaded, num_bytes = _read(specs, kept, show=progress and group.rank == 0)
    notes = _notes(skipped)
    if group.rank == 0:
        for note in notes:
            _log.info("%s", note)
    return LoadSummary(num_loaded, num_bytes, time.monotonic() - started, dict(skipped), notes)


def with_other_stages(specs: Sequence[TensorSpec], pipeline: "RankGroup") -> list[TensorSpec]:
    """``specs`` and what the other pipeline stages need, to be there but not read. Collective over ``pipeline``."""
    if pipeline.size == 1:
        return list(specs)
    own = {spec.key for spec in specs}
    names = pipeline.all_gather_object([[spec.key, list(spec.shape)] for spec in specs], "names of weights")
    elsewhere = {key: tuple(shape) for stage in names for key, shape in stage if key not in own}
    return [*specs, *(TensorSpec(key, shape, None, (), ()) for key, shape in elsewhere.items())]


TIED_HEAD = "head tied to the embedding by config.json"
MTP_LAYER = "multi-token-prediction layer"
BUFFER = "rotary buffer, computed here"


def skip_rule(key: str, num_hidden_layers: int, tied_head: str | None = None) -> str | None:
    """The rule by which a stored tensor is left out, or None. Layer numbers count whatever stands before them."""
    layer = _layer_of(key)
    if (layer is not None and layer >= num_hidden_layers) or key.startswith("mtp."):
        return MTP_LAYER
    if key.endswith("rotary_emb.inv_freq"):
        return BUFFER
    return TIED_HEAD if key == tied_head else None


class _AllOrNone:
    """Ends in a vote: if the block raised on any rank, it raises on every rank."""

    def __init__(self, group: "RankGroup", what: str) -> None:
        self.group, self.what = group, what

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if self.group.size == 1 or (error is not None and not isinstance(error, Exception)):
            return
        own = None if error is None else str(error) or type(error).__name__
        errors = self.group.channel.exchange(own, self.what, LOAD_TIMEOUT_S)
        failed = [rank for rank, text in enumerate(errors) if text is not None]
        if error is None and failed:
            raise CheckpointError(f"{self.what} failed on rank {failed[0]}: {errors[failed[0]]}")


def _apply_rules(
    stored: dict[str, StoredTensor], num_hidden_layers: int, tied_head: str | None
) -> tuple[dict[str, StoredTensor], Counter[str]]:
    rules = {key: skip_rule(key, num_hidden_layers, tied_head) for key in stored}
    kept = {key: tensor for key, tensor in stored.items() if rules[key] is None}
    return kept, Counter(rule for rule in rules.values() if rule is not None)


def _compare(specs: Sequence[TensorSpec], kept: dict[str, StoredTensor], tied_head: str | None) -> None:
    needed = {spec.key: spec.shape for spec in specs}
    missing = [key for key in needed if key not in kept]
    unexpected = [key for key in kept if key not in needed]
    misshapen = [key for key in needed if key in kept and kept[key].shape != tuple(needed[key])]
    unknown = [key for key in needed if key in kept and kept[key].dtype not in ITEMSIZE]
    missing_set, unexpected_set = set(missing), set(unexpected)
    sections = [
        _section("missing", missing, lambda key: _near(key, "stored", unexpected_set or kept)),
        _section("unexpected", unexpected, lambda key: _near(key, "expected", missing_set or needed)),
        _section("of another shape", misshapen, lambda k: f"{list(kept[k].shape)}, expected {list(needed[k])}"),
        _section("of an unknown dtype", unknown, lambda k: f"{kept[k].dtype}, expected {' or '.join(ITEMSIZE)}"),
    ]
    text = "\n".join(section for section in sections if section)
    if text:
        raise CheckpointError(f"the checkpoint does not fit the model:\n{text}\n{_way_out(missing)}")


def _section(title: str, keys: list[str], explain: Any) -> str:
    if not keys:
        return ""
    lines = [f"  {key}  ({explain(key)})" for key in keys[:NUM_LISTED]]
    if len(keys) > NUM_LISTED:
        lines.append(f"  ... and {len(keys) - NUM_LISTED} more")
    return "\n".join([f"{len(keys)} {title}:", *lines])


def _way_out(missing: list[str]) -> str:
    if any(key.endswith("lm_head.weight") for key in missing):
        return "config.json does not tie the head to the embedding; set tie_word_embeddings, or take the complete files"
    return "config.json and the safetensors files must come from the same model, and all its files must be there"


def _near(key: str, kind: str, names: Iterable[str]) -> str:
    """The nearest name, looked for among those of the same layer first, so that a large model's list stays cheap."""
    layer, last = _layer_of(key), key.rpartition(".")[2]
    same_layer = [name for name in names if _layer_of(name) == layer]
    candidates = same_layer or [name for name in names if name.endswith(last)]
    near = difflib.get_close_matches(key, candidates[:NUM_CANDIDATES], n=1, cutoff=0.5)
    return f"nearest {kind}: {near[0]}" if near else f"no {kind} name is near"


def _layer_of(key: str) -> int | None:
    match = _LAYER.search(key)
    return int(match.group(1)) if match else None


def _read(specs: Sequence[TensorSpec], kept: dict[str, StoredTensor], *, show: bool) -> tuple[int, int]:
    wanted = [spec for spec in specs if spec.param is not None and all(s.stop > s.start for s in spec.src)]
    total = sum(_num_bytes(spec, kept[spec.key]) for spec in wanted)
    reader = Reader()
    try:
        with tqdm(total=total, desc="weights", unit="B", unit_scale=True, disable=not show, mininterval=0.5) as bar:
            for spec in wanted:
                for rows, values in reader.chunks(spec.key, kept[spec.key], spec.src):
                    write_parameter(spec.param, _part_of(spec.dst, rows), values)
                    bar.update(values.nbytes)
    finally:
        reader.close()
    return len({spec.key for spec in wanted}), total


def _num_bytes(spec: TensorSpec, tensor: StoredTensor) -> int:
    count = ITEMSIZE[tensor.dtype]
    for axis in spec.src:
        count *= axis.stop - axis.start
    return count


def _part_of(dst: Index, rows: slice) -> Index:
    """``dst`` narrowed to ``rows`` of its first sliced axis (leading integers pick, say, an expert)."""
    at = next(i for i, axis in enumerate(dst) if isinstance(axis, slice))
    axis = dst[at]
    assert isinstance(axis, slice)
    return (*dst[:at], slice(axis.start + rows.start, axis.start + rows.stop), *dst[at + 1 :])


def _notes(skipped: Counter[str]) -> tuple[str, ...]:
    notes = []
    if skipped[MTP_LAYER]:
        notes.append(f"{skipped[MTP_LAYER]} tensors of multi-token-prediction layers are skipped; they are not used")
    if skipped[TIED_HEAD]:
        notes.append("a head is stored, but config.json ties it to the embedding: the embedding is used")
    return tuple(notes)
