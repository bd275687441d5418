"""One trial of one size, in processes that end with it: whatever a trial does to memory, nothing of it stays.

The processes of a trial (one a rank) work; this one waits, with a deadline, and reads how they ended. As soon as one
has failed the others are ended too: they may wait for it in a reduction.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stoker.batch.out_of_memory import crash_says_out_of_memory
from stoker.batch.target import Maker
from stoker.errors import ConfigError, RunError, StokerError

__all__ = ["Ending", "Trials", "failure", "least_memory"]

_ALLOCATOR = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "131072"}
"""Of glibc, which reads them as a process starts. Further arenas reserve address space, 64 MB a thread, that holds
nothing. And a threshold that is set stays: left alone it grows to 32 MB, freed tensors of less stay in a heap full of
holes, and the peak of the same steps is another in each process, by a fifth and more (docs/fit.md)."""
_GRACE_SECONDS = 3.0
_POLL_SECONDS = 0.02
_SHOWN_CHARACTERS = 4000


@dataclass(frozen=True)
class Ending:
    """How the process of one rank ended."""

    end: str
    """"ran", "out of memory", "doubtful" (perhaps out of memory), "killed", "deadline", "error", or "stopped"
    (another rank had failed)."""
    told: dict[str, Any]
    """Its last line; empty where it left none."""
    reason: str
    """For people: what ended it, and where it was."""
    text: str
    """The traceback, or the end of its output."""


def failure(what: str, ending: Ending) -> StokerError:
    """The error of a trial that can't go on: in stoker's own words where it raised it, else with the traceback."""
    kind = ending.told.get("kind")
    words = ending.text if kind else f"{ending.reason}\n{ending.text}"
    return (ConfigError if kind == "ConfigError" else RunError)(f"{what}: {words}")


def least_memory() -> dict[str, str]:
    """The allocator's settings in a trial; one that this process has been given stays."""
    return {key: os.environ.get(key, value) for key, value in _ALLOCATOR.items()}


@dataclass(frozen=True)
class Trials:
    """Runs trials of one target."""

    maker: Maker
    ranks: int = 1
    steps: int = 2
    deadline_seconds: float = 600
    longest: int | None = None
    environment: Mapping[str, str] = field(default_factory=least_memory)
    """Of its processes, beside what this one has."""

    def inspect(self) -> dict[str, Any]:
        """Unit, most, device, capacity and trace of the target. ConfigError where it isn't one, RunError with
        the traceback where making it fails.
        """
        (ending,) = self._run(1, {"inspect": True, "size": 0, "steps": 0, "limit_bytes": None})
        if ending.end != "ran":
            raise failure(f"the target '{self.maker.path}' can't be tried", ending)
        return ending.told

    def try_size(self, size: int, limit_bytes: int | None, steps: int | None = None) -> Ending:
        """The worst ending of all ranks; their largest peak and longest step. RunError on anything but a size's fault.

        An ending in doubt is settled by the same trial without the limit: what runs then lacked memory.
        """
        request = {"inspect": False, "size": size, "steps": steps or self.steps, "limit_bytes": limit_bytes}
        ending = _together(self._run(self.ranks, request))
        if ending.end == "doubtful":
            return self._settled(ending, request)
        if ending.end == "error":
            raise failure(f"the trial of size {size} failed, and not for memory", ending)
        return ending

    def _settled(self, doubtful: Ending, request: dict[str, Any]) -> Ending:
        size, limit = request["size"], request["limit_bytes"]
        if limit is not None:
            freed = _together(self._run(self.ranks, request | {"limit_bytes": None}))
            if freed.end == "ran":
                return Ending("out of memory", {}, f"{doubtful.reason}; without the limit it runs", doubtful.text)
        without = "" if limit is None else " (it fails without the limit too)"
        raise failure(f"the trial of size {size} failed, and not surely for memory{without}", doubtful)

    def _run(self, ranks: int, request: dict[str, Any]) -> list[Ending]:
        with tempfile.TemporaryDirectory(prefix="stoker-trial-", ignore_cleanup_errors=True) as name:
            folder = Path(name)
            request = request | {
                "parent": os.getpid(),
                "maker": self.maker.path,
                "arguments": list(self.maker.arguments),
                "ranks": ranks,
                "meeting": str(folder / "meeting"),
                "deadline_seconds": self.deadline_seconds,
                "longest": self.longest,
            }
            (folder / "request.json").write_text(json.dumps(request), encoding="utf-8")
            started: list[subprocess.Popen[bytes]] = []
            try:
                started += [_start(folder, rank, ranks, self.environment) for rank in range(ranks)]
                in_time = _wait(started, folder, time.monotonic() + self.deadline_seconds)
            finally:
                ended = [_end(process) for process in started]
            unfinished = "stopped" if in_time else "deadline"
            return [
                _ending(folder, rank, process.returncode, "" if alone else unfinished)
                for rank, (process, alone) in enumerate(zip(started, ended, strict=True))
            ]


def _start(folder: Path, rank: int, ranks: int, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    group = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)} if ranks > 1 else {}
    with (folder / f"output-{rank}").open("wb") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "stoker.batch.trial", str(folder / "request.json"), str(folder / f"lines-{rank}")],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment, **group},
            start_new_session=True,  # its workers end with it
        )


def _wait(started: list[subprocess.Popen[bytes]], folder: Path, until: float) -> bool:
    """Until all have ended, or one has failed and the others had time to end as well; False: time is up before."""
    failed_at: float | None = None
    while any(process.poll() is None for process in started):
        now = time.monotonic()
        if now > until:
            return False
        over = [rank for rank, process in enumerate(started) if process.poll() is not None]
        if failed_at is None and any(_last_line(folder, rank).get("end") != "ran" for rank in over):
            failed_at = now
        if failed_at is not None and now - failed_at > _GRACE_SECONDS:
            return True
        time.sleep(_POLL_SECONDS)
    return True


def _end(process: subprocess.Popen[bytes]) -> bool:
    """End all that the process started, and it; True where it had ended before."""
    alone = process.poll() is not None
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        process.kill()  # does nothing where it has ended
    process.wait()
    return alone


def _lines(folder: Path, rank: int) -> list[dict[str, Any]]:
    try:
        text = (folder / f"lines-{rank}").read_text(encoding="utf-8")
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def _last_line(folder: Path, rank: int) -> dict[str, Any]:
    return (_lines(folder, rank) or [{}])[-1]


def _ending(folder: Path, rank: int, code: int, unfinished: str) -> Ending:
    """`unfinished`: why it was ended from here; "": it wasn't."""
    told = _last_line(folder, rank)
    output = (folder / f"output-{rank}").read_text(encoding="utf-8", errors="replace")[-_SHOWN_CHARACTERS:]
    if "end" in told:
        return Ending(told["end"], told, told.get("reason", ""), told.get("traceback", ""))
    at = {"made": "before its first step"}.get(told.get("at", ""), f"in {told.get('at', 'the making of the target')}")
    if unfinished:
        return Ending(unfinished, {}, f"not done by its deadline, {at}", output)
    if code == -signal.SIGKILL:
        return Ending("killed", {}, f"killed by the operating system (SIGKILL) {at}: the host's memory ran out", output)
    how = f"ended by {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
    if crash_says_out_of_memory(output):
        return Ending("out of memory", {}, f"{how} {at}: {output.strip().splitlines()[-1]}", output)
    return Ending("doubtful", {}, f"{how} {at}", output)


def _together(endings: list[Ending]) -> Ending:
    """What all ranks agree on: the worst ending; where all ran, the largest peak and the longest step."""
    # Where a rank is gone the others' reductions fail: what they report isn't the cause.
    order = ["out of memory", "killed", "doubtful", "error", "deadline", "stopped", "ran"]
    worst = min(endings, key=lambda ending: order.index(ending.end))
    if worst.end != "ran":
        return worst
    peaks = [ending.told["peak_bytes"] for ending in endings]
    told = worst.told | {
        "peak_bytes": None if None in peaks else max(peaks),
        "seconds_per_step": max(ending.told["seconds_per_step"] for ending in endings),
        "steps": min(ending.told["steps"] for ending in endings),
    }
    return Ending("ran", told, "", "")
