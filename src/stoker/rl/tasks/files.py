"""Rows from JSONL, CSV and parquet files and from dataset folders. A row that can't be read keeps its place."""

import csv
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stoker.config.task import DATA_SUFFIXES
from stoker.errors import DataError

__all__ = ["BadRow", "RawRow", "read_file", "read_folder"]


@dataclass(frozen=True)
class RawRow:
    """One row as the source has it."""

    place: str
    """`file:line` or `file, row n`, for messages."""
    columns: Mapping[str, Any]


@dataclass(frozen=True)
class BadRow:
    """A row that can't be used, and why."""

    place: str
    reason: str


Rows = Iterator[RawRow | BadRow]


def _jsonl(file: Path) -> Rows:
    with file.open("rb") as lines:
        for number, raw in enumerate(lines, start=1):
            place = f"{file}:{number}"
            try:
                text = raw.decode("utf-8-sig")
                if not text.strip():  # an empty line holds no row
                    continue
                row = json.loads(text)
            except UnicodeDecodeError as error:
                yield BadRow(place, f"not UTF-8 ({error.reason} at byte {error.start})")
            except json.JSONDecodeError as error:  # its own words count lines within this line
                yield BadRow(place, f"not JSON: {error.msg} at character {error.pos + 1}")
            except (ValueError, RecursionError) as error:  # ValueError: numbers of thousands of digits, too
                yield BadRow(place, f"not JSON: {error}")
            else:
                if isinstance(row, dict):
                    yield RawRow(place, row)
                else:
                    yield BadRow(place, f"a JSON {type(row).__name__}, not an object")


def _csv(file: Path) -> Rows:
    with file.open(encoding="utf-8-sig", newline="") as lines:
        reader = csv.reader(lines, strict=True)
        header: list[str] | None = None
        while True:
            first_line = reader.line_num + 1
            try:
                cells = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                yield BadRow(f"{file}:{first_line}", f"not CSV: {error}")
                continue
            except UnicodeDecodeError as error:
                raise DataError(f"{file} is not UTF-8 near line {first_line}: save it as UTF-8") from error
            if not cells:  # an empty line holds no row
                continue
            if header is None:
                header = cells
            elif len(cells) != len(header):
                yield BadRow(f"{file}:{first_line}", f"{len(cells)} cells where the header has {len(header)}")
            else:
                yield RawRow(f"{file}:{first_line}", dict(zip(header, cells, strict=True)))


def _batches(file: Path) -> Iterator[Any]:
    """Arrow record batches of a parquet file or of an Arrow stream (what `datasets` saves)."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        if file.suffix == ".parquet":
            with pq.ParquetFile(file) as parquet:
                yield from parquet.iter_batches()
        else:
            with pa.memory_map(str(file)) as mapped, pa.ipc.open_stream(mapped) as stream:
                yield from stream
    except (pa.ArrowInvalid, OSError) as error:
        raise DataError(f"{file} can't be read: {error}. Is it whole, and really {file.suffix[1:]}?") from error


def _arrow(file: Path) -> Rows:
    number = 0
    for batch in _batches(file):
        for row in batch.to_pylist():
            yield RawRow(f"{file}, row {number}", row)
            number += 1


def read_file(file: Path) -> Rows:
    """Rows of one data file, by its suffix."""
    if file.suffix not in DATA_SUFFIXES:
        raise DataError(f"{file}: unknown kind of data file; there is {', '.join(DATA_SUFFIXES)}")
    return {".csv": _csv, ".parquet": _arrow}.get(file.suffix, _jsonl)(file)  # all others hold JSON lines


def _saved_by_datasets(folder: Path) -> list[Path]:
    """The Arrow files of a folder written by `Dataset.save_to_disk`."""
    state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
    return [folder / entry["filename"] for entry in state["_data_files"]]


def _of_split(folder: Path, files: list[Path], split: str) -> list[Path]:
    """Files with the split's name as a word of their path; all of them, where no file names any split."""

    def words(file: Path) -> set[str]:
        return set(re.split(r"[^a-z0-9]+", str(file.relative_to(folder)).lower()))

    named = [file for file in files if split.lower() in words(file)]
    if named:
        return named
    others = {"train", "test", "validation", "valid", "val", "dev", "eval"}
    if split == "train" and not any(words(file) & others for file in files):
        return files
    listed = ", ".join(str(file.relative_to(folder)) for file in files[:10])
    raise DataError(f"{folder}: no file is of split '{split}' (found {listed}); set the source's `split`")


def read_folder(folder: Path, split: str) -> Rows:
    """Rows of a dataset folder: one saved by `datasets`, or one of parquet, JSONL and CSV files."""
    if (folder / "dataset_dict.json").is_file():
        splits = json.loads((folder / "dataset_dict.json").read_text(encoding="utf-8"))["splits"]
        if split not in splits:
            raise DataError(f"{folder}: no split '{split}'; there is {', '.join(splits)}: set the source's `split`")
        folder = folder / split
    if (folder / "state.json").is_file():
        for file in _saved_by_datasets(folder):
            yield from _arrow(file)
        return
    files = sorted(file for file in folder.rglob("*") if file.suffix in DATA_SUFFIXES and file.is_file())
    if not files:
        raise DataError(f"{folder} holds no data files ({', '.join(DATA_SUFFIXES)})")
    for file in _of_split(folder, files, split):
        yield from read_file(file)
