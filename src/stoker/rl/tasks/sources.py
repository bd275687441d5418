"""Where rows come from: a file, a dataset folder, a Hugging Face dataset name, or a Python generator."""

import importlib
import itertools
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from stoker import dotted
from stoker.config.task import DATA_SUFFIXES, Data
from stoker.errors import DataError
from stoker.rl.tasks.files import BadRow, RawRow, read_file, read_folder

__all__ = ["name_of", "read_source"]

MAX_GENERATED = 5_000_000
"""Rows after which a generator without `limit` is taken for endless."""

_GENERATOR = re.compile(r"(?:.+\.py|[A-Za-z_][\w.]*):(?P<function>[A-Za-z_]\w*)")
_HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w.-]+)?")


def name_of(source: Data) -> str:
    """The source's own name, or one taken from its path: file stem, folder, data set or function."""
    if source.name:
        return source.name
    if generator := _GENERATOR.fullmatch(source.path):
        return generator["function"]
    stem = Path(source.path).stem if Path(source.path).suffix in DATA_SUFFIXES else Path(source.path).name
    return stem if source.split == "train" else f"{stem}-{source.split}"


def read_source(source: Data) -> Iterator[RawRow | BadRow]:
    """Rows of a source, at most `limit` of them. Raises DataError where the source itself can't be read."""
    rows = _open(source)
    return itertools.islice(rows, source.limit) if source.limit else rows


def _open(source: Data) -> Iterator[RawRow | BadRow]:
    if _GENERATOR.fullmatch(source.path):
        return _generated(source, _function(source.path))
    path = Path(source.path).expanduser()
    if path.is_file():
        return read_file(path)
    if path.is_dir():
        return read_folder(path, source.split)
    if path.suffix in DATA_SUFFIXES or not _HUB_NAME.fullmatch(source.path):
        raise DataError(f"task source '{source.path}': no such file or folder (looked in {Path.cwd()})")
    return _hub(source)


def _hub(source: Data) -> Iterator[RawRow | BadRow]:
    taken_for = f"task source '{source.path}' is no file or folder here, so it is taken for a Hugging Face dataset"
    try:
        datasets = importlib.import_module("datasets")
    except ImportError as error:
        raise DataError(
            f"{taken_for}, which needs the `datasets` package: pip install datasets, "
            "or give a JSONL, parquet or CSV file or a dataset folder"
        ) from error
    try:
        data = datasets.load_dataset(source.path, split=source.split, **source.kwargs)
    except Exception as error:  # the hub client raises many kinds; all mean the same to the user
        raise DataError(
            f"{taken_for}, and it can't be loaded ({type(error).__name__}: {error}). Offline? "
            "Give a local file or folder. Several configurations? Set the source's `kwargs = {name = ...}`"
        ) from error
    return (RawRow(f"{source.path}[{source.split}], row {i}", dict(row)) for i, row in enumerate(data))


def _generated(source: Data, function: Callable[..., Iterable[Any]]) -> Iterator[RawRow | BadRow]:
    try:
        iterator = iter(function(**source.kwargs))
    except Exception as error:
        raise DataError(
            f"task source '{source.path}': calling it with kwargs = {source.kwargs} raised "
            f"{type(error).__name__}: {error}. It must return an iterable of dicts"
        ) from error
    for number in itertools.count():
        place = f"{source.path}, row {number}"
        if number >= MAX_GENERATED:
            raise DataError(f"{source.path} gave {number} rows and goes on: set the source's `limit`")
        try:
            row = next(iterator)
        except StopIteration:
            return
        except Exception as error:
            raise DataError(f"{place}: the generator raised {type(error).__name__}: {error}") from error
        yield RawRow(place, row) if isinstance(row, dict) else BadRow(place, f"a {type(row).__name__}, not a dict")


def _function(path: str) -> Callable[..., Iterable[Any]]:
    try:
        return dotted.load(path, "task source", DataError)
    except DataError:
        raise
    except Exception as error:  # whatever the user's module raises
        where = path.rpartition(":")[0]
        raise DataError(f"task source '{path}': importing {where} failed ({type(error).__name__}: {error})") from error
