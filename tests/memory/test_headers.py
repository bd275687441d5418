"""Files are written by the reference implementation, then damaged by hand."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from stoker.errors import CheckpointError
from stoker.memory import read_checkpoint

TENSORS = {"a": torch.zeros(3, 4), "b": torch.zeros(5, dtype=torch.bfloat16), "c": torch.zeros(2, 0)}


def test_counts_and_bytes_of_one_file(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors", {"format": "pt"})
    for path in (tmp_path, tmp_path / "model.safetensors"):
        found = read_checkpoint(path)
        assert (found.parameters, found.nbytes) == (17, 58)
        assert found.by_dtype() == {"F32": 48, "BF16": 10}
    assert json.loads(json.dumps(found.to_json()))["parameters"] == 17
    assert str(found).endswith("17 parameters in 3 tensors, 0.000 GB BF16, 0.000 GB F32")


def shards(folder: Path) -> dict[str, str]:
    save_file({"a": TENSORS["a"]}, folder / "one.safetensors")
    save_file({"b": TENSORS["b"], "c": TENSORS["c"]}, folder / "two.safetensors")
    return {"a": "one.safetensors", "b": "two.safetensors", "c": "two.safetensors"}


def index(folder: Path, homes: Any) -> Path:
    path = folder / "model.safetensors.index.json"
    path.write_text(json.dumps({"weight_map": homes}))
    return path


def test_counts_of_a_sharded_checkpoint(tmp_path: Path) -> None:
    index(tmp_path, shards(tmp_path))
    found = read_checkpoint(tmp_path)
    assert (found.parameters, found.nbytes, sorted(found.tensors)) == (17, 58, ["a", "b", "c"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"a": "../one.safetensors"}, "leaves the folder"),
        ({"a": "/etc/passwd"}, "leaves the folder"),
        ({"a": "none.safetensors"}, "not readable"),
        ({"d": "one.safetensors"}, "'d' is in the file or in the index"),
        ({"a": "two.safetensors"}, "'a' is in the file or in the index"),
        ({"a": 3}, "from names to file names"),
    ],
)
def test_an_index_that_does_not_fit_its_files(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = index(tmp_path, shards(tmp_path) | change)
    with pytest.raises(CheckpointError, match=message):
        read_checkpoint(path)


def test_an_index_that_is_none(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors.index.json"
    for text in ("[]", "{", "{}", '{"weight_map": {"a": "x", "a": "y"}}', "[" * 100_000):
        path.write_text(text)
        with pytest.raises(CheckpointError, match="not an index"):
            read_checkpoint(tmp_path)
    path.unlink()
    with pytest.raises(CheckpointError, match="holds neither"):
        read_checkpoint(tmp_path)


def entry(begin: int = 0, end: int = 8, **more: Any) -> dict[str, Any]:
    return {"dtype": "F32", "shape": [2], "data_offsets": [begin, end], **more}


@pytest.mark.parametrize(
    "header",
    [
        [],
        {"t": 1},
        {"t": {"dtype": "F32"}},
        {"t": entry(extra=1)},
        {"t": entry(dtype="F33")},
        {"t": entry(dtype=["F32"])},
        {"t": entry(shape=[-2])},
        {"t": entry(shape=[True, 2])},
        {"t": entry(shape=[2.0])},
        {"t": entry(shape=2)},
        {"t": entry(shape=[2**70])},
        {"t": entry(shape=[3])},  # 12 bytes
        {"t": entry(1, 9)},  # a hole
        {"t": entry(8, 0)},
        {"t": entry(0, 8, data_offsets=[0, 8, 9])},
        {"t": entry(), "u": entry()},  # over one another
        {"t": entry(), "u": entry(8, 16)},  # past the end
        {},  # data that nobody has
    ],
)
def test_damaged_headers(tmp_path: Path, header: Any) -> None:
    text = json.dumps(header).encode()
    path = tmp_path / "x.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(8))
    with pytest.raises(CheckpointError, match=r"x\.safetensors: damaged header"):
        read_checkpoint(path)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"1234",
        struct.pack("<Q", 2**63) + b"{}",  # would be read for ever
        struct.pack("<Q", 100_000_001) + b"{}",
        struct.pack("<Q", 3) + b"{}",
        struct.pack("<Q", 0),
    ],
)
def test_headers_longer_than_the_file(tmp_path: Path, raw: bytes) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(raw)
    with pytest.raises(CheckpointError, match="not a whole safetensors file"):
        read_checkpoint(path)


@pytest.mark.parametrize("text", [b"\xff\xfe", b'{"t":1,"t":2}', b"[" * 100_000, b'{"t": NaN}'])
def test_headers_that_are_no_object(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text)
    with pytest.raises(CheckpointError, match="damaged header"):
        read_checkpoint(path)
