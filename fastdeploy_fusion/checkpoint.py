"""The safetensors files of a checkpoint: what they hold, and slices of it without keeping the files in memory."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# safetensors hands bfloat16 to numpy only once ml_dtypes is imported.
import ml_dtypes  # noqa: F401
import numpy as np
from safetensors import SafetensorError, safe_open

from .errors import CheckpointError

INDEX_FILE = "model.safetensors.index.json"
ITEMSIZE = {"F32": 4, "F16": 2, "BF16": 2}
"""Stored dtypes that are read, by the name in the file's own header."""

CHUNK_BYTES = 2 << 20
REOPEN_BYTES = 16 << 20
"""Files are mapped, and pages once read count as this process's memory until the file is closed."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor as a file's header describes it."""

    file: Path
    dtype: str
    shape: tuple[int, ...]


def scan(model_dir: Path) -> dict[str, StoredTensor]:
    """All tensors of the checkpoint, from the headers alone.

    Raises:
        CheckpointError: no file, a file that is missing, truncated or unreadable, a broken index, or a tensor stored
            twice. Every unreadable file is named.
    """
    stored: dict[str, StoredTensor] = {}
    problems = []
    for file in _files(model_dir):
        try:
            found = _header(file)
        except (OSError, SafetensorError) as error:
            problems.append(f"{file} ({_size(file)}): {error}")
            continue
        for key, tensor in found.items():
            if key in stored:
                problems.append(f"{key} is stored in both {stored[key].file.name} and {file.name}")
            stored[key] = tensor
    if problems:
        listed = "\n  ".join(problems)
        raise CheckpointError(f"can't read the checkpoint:\n  {listed}\ndownload or copy the named files again")
    return stored


class Reader:
    """Slices of stored tensors, in chunks of rows. At most ``REOPEN_BYTES`` of mapped pages stay behind."""

    def __init__(self) -> None:
        self._file: Path | None = None
        self._handle: Any = None
        self._touched = 0

    def chunks(self, key: str, tensor: StoredTensor, index: tuple[slice, ...]) -> Iterator[tuple[slice, np.ndarray]]:
        """``(rows, values)``: ``values`` is part of ``tensor[index]``, at ``rows`` of its first axis.

        Raises:
            CheckpointError: the file can't be read any more.
        """
        first, *rest = index
        row_bytes = ITEMSIZE[tensor.dtype] * int(np.prod(tensor.shape[1:], dtype=np.int64))
        step = max(1, CHUNK_BYTES // max(1, row_bytes))
        for start in range(first.start, first.stop, step):
            stop = min(start + step, first.stop)
            try:
                where = (slice(start, stop), *rest)
                values = self._open(tensor.file).get_slice(key)[where]
            except (OSError, SafetensorError) as error:
                raise CheckpointError(f"can't read {key} from {tensor.file}: {error}; copy the file again") from error
            self._touched += (stop - start) * row_bytes
            yield slice(start - first.start, stop - first.start), values

    def close(self) -> None:
        if self._handle is not None:
            self._handle.__exit__(None, None, None)
        self._file = self._handle = None

    def _open(self, file: Path) -> Any:
        if file != self._file or self._touched >= REOPEN_BYTES:
            self.close()
            self._handle = safe_open(str(file), "np").__enter__()
            self._file, self._touched = file, 0
        return self._handle


def _header(file: Path) -> dict[str, StoredTensor]:
    with safe_open(str(file), "np") as handle:
        slices = {key: handle.get_slice(key) for key in handle.keys()}  # noqa: SIM118
        return {key: StoredTensor(file, str(s.get_dtype()), tuple(s.get_shape())) for key, s in slices.items()}


def _files(model_dir: Path) -> list[Path]:
    index = model_dir / INDEX_FILE
    if index.exists():
        return _files_of_index(index)
    files = sorted(model_dir.glob("*.safetensors"))
    if not files:
        names = sorted(path.name for path in model_dir.iterdir())[:20] if model_dir.is_dir() else "no folder"
        raise CheckpointError(f"{model_dir} has no *.safetensors file (it has: {names}); give a safetensors checkpoint")
    single = model_dir / "model.safetensors"
    return [single] if single in files else files


def _files_of_index(index: Path) -> list[Path]:
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        names = sorted(set(weight_map.values()), key=str)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{index} is not a safetensors index ({type(error).__name__}: {error}); download or copy it again"
        ) from error
    outside = [name for name in names if not isinstance(name, str) or Path(name).name != name]
    if outside:
        raise CheckpointError(f"{index} names {outside}, outside its folder; download or copy it again")
    return [index.parent / name for name in names]


def _size(file: Path) -> str:
    return f"{file.stat().st_size} bytes" if file.exists() else "missing"
