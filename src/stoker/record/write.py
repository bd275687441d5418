"""The run's own record: append-only JSON lines, each written whole.

A line that a kill tore is cut off when the log is next opened, so every log stays valid JSON lines. The
first line of each log is a header with its schema version. NaN and infinities, which JSON lacks, are
written as the strings "nan", "inf" and "-inf"; `stoker.record.read` turns them back into floats.
"""

import gzip
import json
import math
import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Self

from stoker.record.disk import Patience, fsync_path, when_full
from stoker.record.folder import RunFolder

__all__ = ["SCHEMA_VERSION", "Lines", "Recorder", "encode"]

SCHEMA_VERSION = 1


def _plain(value: Any) -> Any:
    """Value as strict JSON can hold it; numpy numbers become Python's."""
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(float(value))
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if hasattr(value, "tolist"):  # numpy scalars and arrays
        return _plain(value.tolist())
    raise TypeError(f"a {type(value).__name__} can't be recorded: give a number, string, list or mapping")


_JSON = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=_plain)


def encode(record: Mapping[str, Any]) -> bytes:
    """One line of strict JSON, newline included."""
    try:
        text = _JSON.encode(record)
    except (ValueError, TypeError):  # a NaN, an infinity, or a key that isn't a string
        text = _JSON.encode(_plain(record))
    return text.encode("utf-8", "backslashreplace") + b"\n"


class Lines:
    """An append-only JSON-lines file. Nothing is buffered: what `append` returned from outlives a kill."""

    def __init__(self, path: Path, kind: str, patience: Patience) -> None:
        self._path = path
        self._patience = patience
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        self._size = _whole_lines(self._file)
        os.ftruncate(self._file, self._size)
        if self._size == 0:
            self.append({"schema_version": SCHEMA_VERSION, "kind": kind})

    def append(self, record: Mapping[str, Any]) -> None:
        """Write one line; waits while the disk is full, then raises RunError with the file left whole."""
        line = encode(record)
        when_full(lambda: self._write(line), self._path.name, self._path, self._patience)

    def try_append(self, record: Mapping[str, Any]) -> None:
        """Write one line that may be lost: a full disk is no reason to wait."""
        try:
            self._write(encode(record))
        except OSError:
            return

    def _write(self, line: bytes) -> None:
        try:
            written = 0
            while written < len(line):  # more than once only where the disk fills up in the middle
                written += os.write(self._file, line[written:])
        except OSError:
            os.ftruncate(self._file, self._size)
            raise
        self._size += len(line)

    def sync(self) -> None:
        """Make what was written survive a power cut."""
        when_full(lambda: os.fsync(self._file), self._path.name, self._path, self._patience)

    def close(self) -> None:
        os.close(self._file)


def _whole_lines(file: int) -> int:
    """Size of the file up to its last newline, in bytes."""
    end = os.fstat(file).st_size
    while end > 0:
        start = max(0, end - 65536)
        newline = os.pread(file, end - start, start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        end = start
    return 0


class Recorder:
    """Writes metrics.jsonl, events.jsonl and samples/ of one attempt at a run."""

    def __init__(self, folder: RunFolder, attempt: int | None = None, patience: Patience | None = None) -> None:
        self.folder = folder
        self.attempt = folder.attempt if attempt is None else attempt
        self.patience = patience or Patience()
        self._metrics = Lines(folder.path / "metrics.jsonl", "metrics", self.patience)
        self._events = Lines(folder.path / "events.jsonl", "events", self.patience)

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """One line for the step: numbers under flat `group/name` keys (see `stoker.record.metrics`)."""
        self._metrics.append({"step": step, "attempt": self.attempt, **values})

    def event(self, kind: str, message: str, *, step: int | None = None, **facts: Any) -> None:
        """Something worth telling a reader of the run later, at this moment."""
        self._events.append(self._event(kind, message, step) | facts)

    def last_words(self, kind: str, message: str) -> None:
        """An event of a run that is failing: lost where the disk is full, since to wait would hide the failure."""
        self._events.try_append(self._event(kind, message, None))

    def _event(self, kind: str, message: str, step: int | None) -> dict[str, Any]:
        wall = round(time.time(), 3)
        return {"kind": kind, "attempt": self.attempt, "step": step, "wall": wall, "message": message}

    def samples(self, step: int, records: Iterable[Mapping[str, Any]]) -> Path:
        """The step's samples, one line each; a step done again replaces the file."""
        return self._write_samples(self.folder.samples / f"step_{step}.jsonl.gz", step, records)

    def evaluation(self, step: int, name: str, records: Iterable[Mapping[str, Any]]) -> Path:
        """The answers to a held-out set at this step, one line each."""
        return self._write_samples(self.folder.samples / f"eval_{name}_step_{step}.jsonl.gz", step, records)

    def bad_batch(self, step: int, records: Iterable[Mapping[str, Any]]) -> Path:
        """The training rows of an update that was refused, to look into."""
        return self._write_samples(self.folder.samples / f"bad_step_{step}.jsonl.gz", step, records)

    def _write_samples(self, path: Path, step: int, records: Iterable[Mapping[str, Any]]) -> Path:
        header = {"schema_version": SCHEMA_VERSION, "kind": "samples", "step": step, "attempt": self.attempt}
        content = gzip.compress(b"".join(map(encode, (header, *records))), compresslevel=6, mtime=0)
        temporary = path.with_name(f".{path.name}.tmp")

        def write() -> None:
            try:
                temporary.write_bytes(content)
                temporary.replace(path)
            finally:
                temporary.unlink(missing_ok=True)

        when_full(write, f"samples/{path.name}", path, self.patience)
        return path

    def sync(self) -> None:
        """Make the record survive a power cut; call it with each checkpoint."""
        self._metrics.sync()
        self._events.sync()
        fsync_path(self.folder.path)

    def close(self) -> None:
        self.sync()
        self._metrics.close()
        self._events.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
