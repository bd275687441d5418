"""What a checkpoint holds, read from the headers of its safetensors files and never from their data.

The format (huggingface/safetensors, README, "Format", read 2026-11): 8 bytes, little-endian, with the header's
length N; N bytes of JSON from tensor names to dtype, shape and data_offsets, the offsets from the end of the header;
then the data, without holes. A file may come from anyone: nothing of it is believed before it is checked.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stoker.errors import CheckpointError

__all__ = ["Checkpoint", "Tensor", "read_checkpoint"]

BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
    "U16": 16, "I16": 16, "F16": 16, "BF16": 16,
    "U32": 32, "I32": 32, "F32": 32,
    "U64": 64, "I64": 64, "F64": 64, "C64": 64,
}  # fmt: skip
"""Bits of an element, by the format's name of the dtype."""
LONGEST_HEADER = 100_000_000
"""Bytes; the format's own limit."""
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


@dataclass(frozen=True)
class Tensor:
    """One tensor's header."""

    dtype: str
    """As the format names it: F32, BF16, ..."""
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.elements * BITS[self.dtype] // 8


@dataclass(frozen=True)
class Checkpoint:
    """The tensors of one checkpoint, all its files together."""

    path: Path
    tensors: Mapping[str, Tensor]

    @property
    def parameters(self) -> int:
        """Elements of all tensors. A packed one (4-bit weights in bytes) counts the elements it is stored as."""
        return sum(tensor.elements for tensor in self.tensors.values())

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def by_dtype(self) -> dict[str, int]:
        """Bytes of each dtype."""
        found: dict[str, int] = {}
        for tensor in self.tensors.values():
            found[tensor.dtype] = found.get(tensor.dtype, 0) + tensor.nbytes
        return found

    def to_json(self) -> dict[str, Any]:
        """Counts, in plain types."""
        return {
            "path": str(self.path),
            "tensors": len(self.tensors),
            "parameters": self.parameters,
            "bytes": self.nbytes,
            "bytes_by_dtype": self.by_dtype(),
        }

    def __str__(self) -> str:
        kinds = ", ".join(f"{size / 1e9:.3f} GB {dtype}" for dtype, size in sorted(self.by_dtype().items()))
        return f"{self.path}: {self.parameters:,} parameters in {len(self.tensors)} tensors, {kinds}"


def read_checkpoint(path: Path | str) -> Checkpoint:
    """The tensors of a `.safetensors` file, of a sharded checkpoint's index, or of the folder that has either.

    Raises CheckpointError, naming the file, where one is missing, damaged, or contradicts itself or the index.
    """
    path = Path(path)
    if path.is_dir():
        found = next((path / name for name in (INDEX, SINGLE) if (path / name).is_file()), None)
        if found is None:
            raise CheckpointError(f"{path}: holds neither {INDEX} nor {SINGLE}; give the file itself")
        path = found
    if path.name.endswith(".json"):
        return Checkpoint(path.parent, _sharded(path))
    return Checkpoint(path, _header(path))


def _sharded(index: Path) -> dict[str, Tensor]:
    try:
        homes = json.loads(index.read_text(encoding="utf-8"), object_pairs_hook=_unique)["weight_map"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{index}: not an index of safetensors files ({error!r}); download it again") from None
    if not isinstance(homes, dict) or not all(isinstance(home, str) for home in homes.values()):
        raise CheckpointError(f"{index}: weight_map isn't from names to file names; download it again")
    tensors: dict[str, Tensor] = {}
    for name in sorted(set(homes.values())):
        if name in (".", "..") or "/" in name or "\\" in name:
            raise CheckpointError(f"{index}: file name {name!r} leaves the folder; don't trust this checkpoint")
        shard = _header(index.parent / name)
        named = {tensor for tensor, home in homes.items() if home == name}
        if shard.keys() != named:
            odd = sorted(shard.keys() ^ named)[0]
            raise CheckpointError(f"{index.parent / name}: tensor {odd!r} is in the file or in the index, not in both")
        tensors |= shard
    return tensors


def _header(path: Path) -> dict[str, Tensor]:
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or not 2 <= length <= min(LONGEST_HEADER, size - 8):
                raise CheckpointError(
                    f"{path}: {size} bytes can't begin with a header of {length}; not a whole safetensors file"
                )
            raw = file.read(length)
    except OSError as error:
        raise CheckpointError(f"{path}: not readable ({error.strerror})") from None
    try:
        header = json.loads(raw, object_pairs_hook=_unique)
        if not isinstance(header, dict):
            raise ValueError(f"a {type(header).__name__}, not an object")
        header.pop("__metadata__", None)
        tensors = {name: _tensor(name, entry) for name, entry in header.items()}
        _check_offsets(header, tensors, size - 8 - length)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: damaged header ({error}); download it again") from None
    return tensors


def _tensor(name: str, entry: Any) -> Tensor:
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"tensor {name!r} needs dtype, shape and data_offsets, and nothing else")
    dtype, shape = entry["dtype"], entry["shape"]
    if not isinstance(dtype, str) or dtype not in BITS:
        raise ValueError(f"tensor {name!r} has dtype {dtype!r}, which isn't known")
    if not _counts(shape) or not _counts(entry["data_offsets"]) or len(entry["data_offsets"]) != 2:
        raise ValueError(f"tensor {name!r} has a shape or data_offsets that aren't numbers of elements and bytes")
    return Tensor(dtype, tuple(shape))


def _counts(values: Any) -> bool:
    # `type`, not isinstance: true is an int too.
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 2**63 for value in values)


def _check_offsets(header: Mapping[str, Any], tensors: Mapping[str, Tensor], data: int) -> None:
    """ValueError unless the tensors lie one after the other and fill the file."""
    place = 0
    for name in sorted(header, key=lambda name: header[name]["data_offsets"]):
        begin, end = header[name]["data_offsets"]
        if begin != place or end - begin != tensors[name].nbytes:
            raise ValueError(
                f"tensor {name!r} lies at bytes {begin} to {end}, expected {tensors[name].nbytes} at {place}"
            )
        place = end
    if place != data:
        raise ValueError(f"{data} bytes of data where the tensors have {place}")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name stands there twice")
    return found
