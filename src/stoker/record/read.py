"""Reading a run back, also one that was killed, resumed, or is still running.

Steps: each start of a run is an attempt, which goes on from a checkpoint. Steps that an earlier attempt
had done after that checkpoint are done again; the later attempt's lines count, and the time of the earlier
ones is the run's redone time. Lines that a kill tore are skipped and named in `notes`.
"""

import gzip
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from stoker.errors import RunError
from stoker.record.write import SCHEMA_VERSION

__all__ = ["Attempt", "Run", "Span", "read_samples"]

Record = dict[str, Any]


@dataclass(frozen=True)
class Span:
    """A stretch of one device's time in one phase. `step` is None before the first step."""

    attempt: int
    device: str
    step: int | None
    phase: str
    start_ns: int
    end_ns: int

    @property
    def seconds(self) -> float:
        return (self.end_ns - self.start_ns) / 1e9


@dataclass(frozen=True)
class Attempt:
    """One start of the run: when, where, and how it ended."""

    number: int
    device: str
    pid: int
    host: str
    started: float
    """Unix seconds."""
    last_seen: float
    """Unix seconds of its last sign of life."""
    seconds: float
    """On the monotonic clock, to the last sign of life."""
    closed: bool
    """False: it was killed, or is still running."""
    peak_mb: int | None
    free_mb: int | None
    """Memory that was left for it at the last sign of life."""


@dataclass(frozen=True)
class Run:
    """Everything the run folder tells."""

    path: Path
    config_text: str
    """config.toml; empty where there is none yet."""
    metrics: list[Record]
    """One record a step, in order, as the last attempt that did the step wrote it."""
    superseded: list[Record]
    """Records of steps that were done again, or will be."""
    spans: list[Span]
    attempts: list[Attempt]
    events: list[Record]
    notes: list[str]

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a run folder; needs no lock, so it also reads a run in progress. Raises RunError if it is none."""
        folder = Path(path)
        if not (folder / "metrics.jsonl").exists() and not (folder / "config.toml").exists():
            raise RunError(f"{folder} is not a run folder: it has neither metrics.jsonl nor config.toml")
        notes: list[str] = []
        lines = [_numbers(line) for line in _read_lines(folder / "metrics.jsonl", notes)]
        clock = _read_lines(folder / "clock.jsonl", notes)
        spans = _spans(clock)
        attempts = _attempts(clock, spans, notes)
        metrics, superseded = _split(lines, _first_steps(lines, spans))
        config = folder / "config.toml"
        config_text = config.read_text(encoding="utf-8") if config.exists() else ""
        events = _read_lines(folder / "events.jsonl", notes)
        return cls(folder, config_text, metrics, superseded, spans, attempts, events, notes)

    def series(self, key: str) -> list[tuple[int, float]]:
        """(step, value) of one metric, where it was recorded."""
        return [(record["step"], record[key]) for record in self.metrics if key in record]

    def seconds_by_phase(self) -> dict[str, float]:
        """Device-seconds of all attempts; redone work included, downtime not."""
        totals: defaultdict[str, int] = defaultdict(int)
        for span in self.spans:
            totals[span.phase] += span.end_ns - span.start_ns
        return {phase: ns / 1e9 for phase, ns in totals.items()}

    def redone_steps(self) -> list[int]:
        """Steps that were finished, lost with an attempt, and had to be done again."""
        return sorted({record["step"] for record in self.superseded})

    def redone_seconds(self) -> float:
        """Device-seconds spent on steps, finished or not, that a later attempt did again."""
        later = _later_first_step(_first_steps([*self.metrics, *self.superseded], self.spans))
        return sum(s.seconds for s in self.spans if s.step is not None and s.step >= later[s.attempt])

    def downtime_seconds(self) -> float:
        """Seconds between attempts by the wall clock, never below 0 for any gap."""
        pairs = zip(self.attempts, self.attempts[1:], strict=False)
        return sum(max(0.0, after.started - before.last_seen) for before, after in pairs)

    def last_end(self) -> str | None:
        """Why the last attempt may have ended without closing its record; None if it did close it."""
        if not self.attempts or self.attempts[-1].closed:
            return None
        last = self.attempts[-1]
        mine = [span for span in self.spans if span.attempt == last.number]
        where = f"in phase {mine[-1].phase} of step {mine[-1].step}" if mine else "at once"
        who = f"attempt {last.number} (pid {last.pid} on {last.host})"
        story = f"{who} ended without a word after {last.seconds:.0f} s, {where}"
        if last.peak_mb is None or last.free_mb is None:
            return f"{story}: killed, or the machine went down"
        figures = f"its memory had peaked at {last.peak_mb:,} MB, with {last.free_mb:,} MB left for it"
        if last.free_mb < 0.1 * last.peak_mb:
            return (
                f"{story}: {figures}; the system probably killed it for memory (exit 137). Lower "
                "update.tokens_per_microbatch or sampling.concurrent_samples, or use a machine with more memory"
            )
        return f"{story}: killed, or the machine went down ({figures})"


def read_samples(path: Path) -> list[Record]:
    """The samples of one step, from samples/step_N.jsonl.gz."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        records = [json.loads(line) for line in file]
    _check_version(records[0], path)
    return records[1:]


def _check_version(header: Mapping[str, Any], path: Path) -> None:
    version = header.get("schema_version")
    if version != SCHEMA_VERSION:
        known = f"this stoker reads {SCHEMA_VERSION}; use the matching stoker"
        raise RunError(f"{path} has schema_version {version}, {known}")


def _read_lines(path: Path, notes: list[str]) -> list[Record]:
    """The records of one log, without its header."""
    if not path.exists():
        return []
    records: list[Record] = []
    content = path.read_bytes()
    lines = content.split(b"\n")
    for number, line in enumerate(lines, start=1):
        if not line:
            continue
        try:
            record = json.loads(line)
        except ValueError:
            where = "its last line is incomplete" if number == len(lines) else f"line {number} is not JSON"
            notes.append(f"{path.name}: {where}, skipped")
            continue
        if number == 1:
            _check_version(record, path)
        else:
            records.append(record)
    return records


def _numbers(record: Record) -> Record:
    """Undo the writer's strings for what JSON lacks."""
    return {key: float(value) if value in ("nan", "inf", "-inf") else value for key, value in record.items()}


def _spans(clock: Iterable[Record]) -> list[Span]:
    """Closed stretches as they stand; of an open one, what its last heartbeat vouches for."""
    spans: dict[tuple[str, int, int], Span] = {}
    for line in clock:
        end = line.get("end_ns", line.get("beat_ns"))
        if end is None:
            continue
        key = (line["device"], line["attempt"], line["start_ns"])
        spans[key] = Span(line["attempt"], line["device"], line["step"], line["phase"], line["start_ns"], end)
    return [span for span in spans.values() if span.end_ns > span.start_ns]


def _attempts(clock: Sequence[Record], spans: Sequence[Span], notes: list[str]) -> list[Attempt]:
    by_number: defaultdict[int, list[Record]] = defaultdict(list)
    for line in clock:
        by_number[line["attempt"]].append(line)
    return [_attempt(lines, spans, notes) for lines in by_number.values() if "started" in lines[0]]


def _attempt(lines: Sequence[Record], spans: Sequence[Span], notes: list[str]) -> Attempt:
    first, number = lines[0], lines[0]["attempt"]
    last_seen = next(lines[-1][key] for key in ("closed", "wall", "started") if key in lines[-1])
    seconds = max((span.end_ns for span in spans if span.attempt == number), default=0) / 1e9
    moved = last_seen - first["started"] - seconds
    if abs(moved) > 5:
        notes.append(
            f"attempt {number}: the wall clock moved {moved:+.0f} s against the run (set, or the machine slept); "
            "durations come from the monotonic clock and are not affected"
        )
    measured = [line for line in lines if "peak_mb" in line]
    peak, free = (measured[-1]["peak_mb"], measured[-1]["free_mb"]) if measured else (None, None)
    closed = any("closed" in line for line in lines)
    who = (first["device"], first["pid"], first["host"], first["started"])
    return Attempt(number, *who, last_seen, seconds, closed, peak, free)


def _first_steps(metrics: Iterable[Record], spans: Iterable[Span]) -> dict[int, int]:
    """By attempt, the first step it worked on. Attempts that ended before their first step aren't in it."""
    first: dict[int, int] = {}
    seen = [(record["attempt"], record["step"]) for record in metrics]
    seen += [(span.attempt, span.step) for span in spans if span.step is not None]
    for attempt, step in seen:
        first[attempt] = min(step, first.get(attempt, step))
    return first


def _later_first_step(first: Mapping[int, int]) -> defaultdict[int, float]:
    """By attempt, the first step that some later attempt did again (infinity: none)."""
    later: defaultdict[int, float] = defaultdict(lambda: float("inf"))
    least = float("inf")
    for attempt in range(max(first, default=0), 0, -1):
        later[attempt] = least
        least = min(least, first.get(attempt, float("inf")))
    return later


def _split(lines: Iterable[Record], first: Mapping[int, int]) -> tuple[list[Record], list[Record]]:
    """(records that count, superseded ones). Several lines of one attempt for one step add up to one record."""
    later = _later_first_step(first)
    kept: dict[int, Record] = {}
    lost: dict[tuple[int, int], Record] = {}
    for line in lines:
        step, attempt = line["step"], line["attempt"]
        if step < later[attempt]:
            kept[step] = kept.get(step, {}) | line
        else:
            lost[attempt, step] = lost.get((attempt, step), {}) | line
    return [kept[step] for step in sorted(kept)], list(lost.values())
