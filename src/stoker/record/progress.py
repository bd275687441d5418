"""What a person watching a run sees: one row a step, and below it what is happening now."""

import json
import math
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from statistics import median
from typing import Literal, NamedTuple, Self, TextIO, cast

from rich.console import Console
from rich.live import Live
from rich.text import Text

from stoker.record.curve import sparkline
from stoker.record.output import Output
from stoker.record.printable import printable
from stoker.record.write import encode

__all__ = ["Eta", "Progress", "duration"]

Mode = Literal["table", "quiet", "json", "silent"]
ROWS_PER_HEADER = 30
SPINNER = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
DOING = {
    "setup": "preparing",
    "fit": "fitting",
    "sample": "sampling",
    "reward": "scoring",
    "score": "log-probs",
    "update": "updating",
    "evaluate": "evaluating",
    "checkpoint": "saving",
    "other": "working",
}


def duration(seconds: float | None) -> str:
    """0:42:10, or 2d 03:10 from a day on; an en dash where it isn't known."""
    if seconds is None or not math.isfinite(seconds):
        return "–"
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours // 24}d {hours % 24:02d}:{minute:02d}" if hours >= 24 else f"{hours}:{minute:02d}:{second:02d}"


class Eta:
    """Time to the end: steps left times the median of the last 20 steps, so that one slow step doesn't count."""

    def __init__(self, total_steps: int) -> None:
        self._total_steps = total_steps
        self._step = 0
        self._last: float | None = None
        self._seconds: deque[float] = deque(maxlen=20)

    def finished(self, step: int, now: float, step_seconds: float | None) -> None:
        """Note the end of a step at `now` (s); its own time stands in where no earlier end is known."""
        took = now - self._last if self._last is not None else step_seconds
        if took is not None and took >= 0:
            self._seconds.append(took)
        self._step, self._last = step, now

    def seconds(self) -> float | None:
        return median(self._seconds) * max(0, self._total_steps - self._step) if self._seconds else None


class Column(NamedTuple):
    title: str
    width: int
    key: str
    form: Callable[[float], str]


def _figure(value: float) -> str:
    """At most seven characters that keep about three digits; astronomic numbers keep one."""
    if not math.isfinite(value) or abs(value) >= 99_999.5:
        return f"{value:.0e}"
    size = abs(value)
    return f"{value:.{3 if size < 9.9995 else 1 if size < 999.95 else 0}f}"


COLUMNS = (
    Column("reward", 7, "reward/mean", _figure),
    Column("held-out", 8, "eval/accuracy", lambda v: f"{100 * v:.1f} %"),
    Column("KL", 7, "kl/mean", lambda v: f"{v:.4f}" if abs(v) < 1 else _figure(v)),
    Column("grad", 7, "optim/grad_norm", _figure),
    Column("tokens", 6, "sample/length_mean", lambda v: f"{v:.1f}" if v < 9999.5 else f"{v:.0f}"),
    Column("cut", 5, "sample/truncated", lambda v: f"{100 * v:.0f} %"),
    Column("s/step", 7, "time/step", lambda v: f"{v:.2f}" if v < 99.995 else f"{v:.0f}"),
)
"""What a row shows of a step's record, between its number and the ETA."""


def held_out(record: Mapping[str, float]) -> float | None:
    """Accuracy of the step's evaluation: the mean over validation sets; None where none took place."""
    found = [value for key, value in record.items() if key.startswith("eval/") and key.endswith("/accuracy")]
    return sum(found) / len(found) if found else None


class Progress:
    """table: rows that grow, with a live line below them on a terminal; json: one object a line; quiet: only
    warnings and the final words; silent: nothing.
    """

    def __init__(
        self,
        mode: Mode,
        total_steps: int,
        *,
        stream: TextIO | None = None,
        terminal: bool | None = None,
        width: int | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._mode = mode
        self._total_steps = total_steps
        self._now = now
        self._stream = Output(stream or sys.stdout)
        self._console = Console(
            file=cast("TextIO", self._stream), force_terminal=terminal, width=width, highlight=False
        )
        if self._console.width < 1:  # a terminal that states no size
            self._console.width = 80
        self._eta = Eta(total_steps)
        self._rows = 0
        self._best = -math.inf
        self._step = 0
        self._rewards: deque[float] = deque(maxlen=20)
        self._phase = "setup"
        self._phase_since = now()
        self._done, self._total, self._unit = 0, 0, ""
        self._live: Live | None = None
        if mode == "table" and self._console.is_terminal:
            self._live = Live(get_renderable=self._status, console=self._console, transient=True, refresh_per_second=8)
            self._live.start()

    def phase(self, name: str) -> None:
        """What is happening now, by the clock's name for it."""
        self._phase, self._phase_since = name, self._now()
        self._done, self._total, self._unit = 0, 0, ""

    def advance(self, done: int, total: int, unit: str) -> None:
        """How far the phase is: done of total (0: not known) samples, tokens, ..."""
        self._done, self._total, self._unit = done, total, unit

    def at_step(self, step: int) -> None:
        """The run goes on after this step."""
        self._step = step

    def step(self, record: Mapping[str, float]) -> None:
        """One row for a finished step; needs `step`, shows what else it finds."""
        self._step = int(record["step"])
        self._eta.finished(self._step, self._now(), record.get("time/step"))
        self.phase("other")
        if "reward/mean" in record:
            self._rewards.append(record["reward/mean"])
        if self._mode == "json":
            self._json({**record, "step": self._step})
        elif self._mode == "table":
            if self._rows == 0 or (self._live and self._rows % ROWS_PER_HEADER == 0):
                self._console.print(self._header(), soft_wrap=True)
            self._rows += 1
            self._console.print(self._row(record), soft_wrap=True)

    def say(self, text: str) -> None:
        """News of some interest; not shown in quiet mode."""
        if self._mode != "quiet":
            self._words("message", text, "")

    def warn(self, text: str) -> None:
        """Something the user should act on; shown in every mode."""
        self._words("warning", text, "yellow", "warning: ")

    def final(self, text: str) -> None:
        """The run's last words; shown in every mode."""
        self._words("final", text, "bold")

    def close(self) -> None:
        """Take the live line away. Safe to call twice."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _json(self, record: Mapping[str, object]) -> None:
        self._stream.write(json.dumps(json.loads(encode(record))) + "\n")  # ASCII: safe for any pipe
        self._stream.flush()

    def _words(self, event: str, text: str, style: str, prefix: str = "") -> None:
        if self._mode == "json":
            self._json({"event": event, "text": text})
        elif self._mode != "silent":
            self._console.print(Text(prefix + printable(text), style=style), soft_wrap=True)

    def _header(self) -> Text:
        titles = [f"{'step':>9}", *(f"{column.title:>{column.width}}" for column in COLUMNS), f"{'ETA':>9}"]
        return Text("  ".join(titles), style="bold underline" if self._live else "")

    def _row(self, record: Mapping[str, float]) -> Text:
        row = Text(f"{f'{self._step}/{self._total_steps}':>9}", style="")
        accuracy = held_out(record)
        for column in COLUMNS:
            value = accuracy if column.key == "eval/accuracy" else record.get(column.key)
            shown = "" if value is None else column.form(value)
            row.append("  ").append(f"{shown:>{column.width}}", style=self._style(column.key, value))
        return row.append(f"  {duration(self._eta.seconds()):>9}", style="dim")

    def _style(self, key: str, value: float | None) -> str:
        if value is None:
            return ""
        if not math.isfinite(value):
            return "bold red"
        if key == "eval/accuracy":
            best, self._best = value > self._best, max(value, self._best)
            return "bold green" if best else "green"
        if key == "sample/truncated" and value > 0.2:
            return "yellow"
        return {"reward/mean": "bold", "time/step": "dim"}.get(key, "")

    def _status(self) -> Text:
        """The live line: what is under way, how far it is, the trend, the time left."""
        now = self._now()
        line = Text().append(f"{SPINNER[int(now * 8) % len(SPINNER)]} ", style="cyan")
        line.append(f"step {min(self._step + 1, self._total_steps)}/{self._total_steps}  ", style="bold")
        line.append(f"{DOING.get(self._phase, self._phase):<10}", style="cyan")
        if self._total > 0:
            full = min(24, round(24 * self._done / self._total))
            line.append(" " + "━" * full, style="cyan").append("━" * (24 - full), style="bright_black")
            line.append(f" {self._done:,}/{self._total:,} {self._unit}")
        elif self._done:
            line.append(f" {self._done:,} {self._unit}")
        else:
            line.append(f" {duration(now - self._phase_since)}", style="dim")
        if len(self._rewards) > 1:
            line.append("  reward ", style="dim").append(sparkline(list(self._rewards), 12), style="green")
        if (left := self._eta.seconds()) is not None:
            line.append(f"  ETA {duration(left)}", style="dim")
        line.truncate(min(100, self._console.width), overflow="ellipsis")
        return line
