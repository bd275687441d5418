"""The folder of one run: a safe name, one owner at a time, and room to write."""

import fcntl
import json
import os
import re
import socket
import weakref
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Self

from stoker.errors import RunError
from stoker.record.disk import free_bytes, gigabytes, is_full

__all__ = ["RunFolder"]

_NAME = re.compile(r"[A-Za-z0-9._-]+")


class RunFolder:
    """`runs_dir/name`, held by this process until released (the system releases it if the process dies).

    Layout: config.toml, batch_plan.json, environment.json, metrics.jsonl, clock.jsonl, events.jsonl,
    samples/step_N.jsonl.gz, checkpoints/step_N/; fit.json where the micro-batch was found by a fit; with --profile also
    profile.json, trace.json.gz.
    """

    def __init__(self, path: Path, lock: int, attempt: int) -> None:
        """Use `create`; `lock` is the open, locked file descriptor."""
        self.path = path
        self.attempt = attempt
        """1 for a fresh run; one more each time the run is started again."""
        self._lock: int | None = lock
        _held.add(self)

    @classmethod
    def create(cls, runs_dir: str | Path, name: str, *, resume: bool) -> Self:
        """Make or open the folder and take it, before anything expensive happens.

        Raises RunError: a bad name, a folder that can't be written, a run in use, a fresh run where one
        already is, a resume where none is.
        """
        path = _inside(Path(runs_dir), name)
        if resume and not path.is_dir():
            raise RunError(f"there is no run {name!r} in {runs_dir} to resume; start it without --resume")
        try:
            for folder in (path, path / "checkpoints", path / "samples"):
                folder.mkdir(parents=True, exist_ok=True)
            probe = path / f".probe-{os.getpid()}"
            probe.write_bytes(b"stoker")
            probe.unlink()
            lock = _take(path / ".lock", name)
        except OSError as error:
            raise RunError(
                f"the run folder {path} can't be written ({error.strerror or error}); "
                f"{'make room' if is_full(error) else 'fix its permissions'} or choose another runs_dir"
            ) from error
        if not resume and _has_work(path):
            os.close(lock)
            raise RunError(f"run {name!r} already has results in {path}; go on with --resume, or give another name")
        return cls(path, lock, _last_attempt(path) + 1)

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def samples(self) -> Path:
        return self.path / "samples"

    def require_free(self, bytes_needed: int, what: str) -> None:
        """Raise RunError unless the disk has room for `what`."""
        free = free_bytes(self.path)
        if free < bytes_needed:
            raise RunError(
                f"{what} needs {gigabytes(bytes_needed)}, but {self.path} has {gigabytes(free)} free; "
                "make room, or choose another runs_dir"
            )

    def release(self) -> None:
        """Let others use the run. Safe to call twice."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.release()


_held: weakref.WeakSet[RunFolder] = weakref.WeakSet()


def _release_in_child() -> None:
    # A forked reward worker shares the open file, and with it the lock: were it to outlive a killed run,
    # the run could not be resumed. Closing the child's copy leaves the parent's lock in place.
    for folder in list(_held):
        folder.release()


os.register_at_fork(after_in_child=_release_in_child)


def _inside(root: Path, name: str) -> Path:
    """The run's path, or RunError where the name would lead out of root."""
    if not _NAME.fullmatch(name) or ".." in name or name.startswith("."):
        raise RunError(
            f"run name {name!r} is not allowed: use letters, digits, '.', '_' and '-', "
            "no '..' and no leading '.' (a run name is a folder name, not a path)"
        )
    path = root.resolve() / name
    if path.resolve() != path:
        raise RunError(f"run {name!r} is a link that leads out of {root} (to {path.resolve()}); give another name")
    return path


def _take(path: Path, name: str) -> int:
    """Lock the file or raise RunError naming who holds it. Returns its descriptor."""
    lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = _owner(os.pread(lock, 4096, 0))
        os.close(lock)
        raise RunError(f"run {name} is in use by {owner}; wait for it, stop it, or give another name") from None
    except OSError:
        os.close(lock)
        raise
    since = datetime.now(UTC).isoformat(timespec="seconds")
    os.ftruncate(lock, 0)
    os.pwrite(lock, json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "since": since}).encode(), 0)
    return lock


def _owner(content: bytes) -> str:
    try:
        facts = json.loads(content)
        return f"pid {facts['pid']} on host {facts['host']} (since {facts['since']})"
    except (ValueError, KeyError, TypeError):
        return "another process (it has just started)"


def _records(path: Path) -> Iterator[dict[str, object]]:
    """Whole JSON lines of a log; what a kill tore is skipped."""
    if not path.exists():
        return
    with path.open("rb") as file:
        for line in file:
            try:
                record = json.loads(line)
            except ValueError:
                continue
            if isinstance(record, dict):
                yield record


def _has_work(path: Path) -> bool:
    steps = any("step" in record for record in _records(path / "metrics.jsonl"))
    return steps or any(path.glob("checkpoints/step_*"))


def _last_attempt(path: Path) -> int:
    logs = ("metrics.jsonl", "clock.jsonl", "events.jsonl")
    attempts = (record.get("attempt", 0) for log in logs for record in _records(path / log))
    return max((number for number in attempts if isinstance(number, int)), default=0)
