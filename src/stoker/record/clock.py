"""Where the device's time goes: every nanosecond from start to close belongs to exactly one phase.

Phases nest by interruption: an inner phase pauses the outer one. Each stretch is a line in clock.jsonl:

    {"attempt":1,"device":"cpu","step":3,"phase":"sample","start_ns":..,"end_ns":..,"wall":..}

`start_ns` and `end_ns` count from the attempt's start on the monotonic clock, so that a clock set back or
forward never gives a negative cost; `wall` (Unix seconds at the end) only serves to date things and to
derive the downtime between attempts. While a stretch is open a thread appends a short `beat_ns` line about
once a second, which readers fold into the stretch: a killed run loses at most a second.

Who waits for whom: phases are entered and left by one thread only, which may wait for space on a full
disk while it holds the lock; the heartbeat thread waits for that lock only, and drops a beat rather than
wait for the disk.
"""

import os
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Self

from stoker.record.disk import Patience
from stoker.record.memory import available_bytes, peak_resident_bytes
from stoker.record.write import Lines

__all__ = ["PHASES", "Clock"]

PHASES = {
    "setup": "loading the model and the task, before the first step",
    "sample": "drawing answers",
    "reward": "waiting for reward functions",
    "score": "log-probs and values of samples: trainer, reference, critic",
    "update": "forward, backward and optimizer steps",
    "evaluate": "held-out prompts: drawing and checking answers",
    "checkpoint": "saving and loading state",
    "other": "everything else: selection, advantages, records",
}
"""What a second of the device can be spent on."""

BEAT_SECONDS = 0.8  # below the promised second, to leave room for a slow disk


def memory() -> dict[str, int]:
    """MB: this process's peak resident memory and what is left for it."""
    return {"peak_mb": peak_resident_bytes() // 2**20, "free_mb": available_bytes() // 2**20}


class Clock:
    """The stopwatch of one engine process. Starts in phase `setup`; step is None until `at_step`."""

    def __init__(
        self,
        path: Path,
        device: str,
        attempt: int,
        *,
        patience: Patience | None = None,
        monotonic_ns: Callable[[], int] = time.monotonic_ns,
        wall: Callable[[], float] = time.time,
        heartbeat: bool = True,
    ) -> None:
        self.attempt = attempt
        self.device = device
        self.around: Callable[[str], AbstractContextManager[object]] = nullcontext
        """Entered with each phase, by its name: a profiler's range, say. Its own time belongs to the phase."""
        self._lines = Lines(path, "clock", patience or Patience())
        self._monotonic_ns = monotonic_ns
        self._wall = wall
        self._zero = monotonic_ns()
        self._last = 0  # latest reading, ns since the start
        self._open_since = 0
        self._step: int | None = None
        self._phases = ["setup"]
        self._totals: defaultdict[str, int] = defaultdict(int)
        self._lock = threading.RLock()
        self._stop = threading.Event()
        self._beating: threading.Thread | None = None
        start = {"attempt": attempt, "device": device, "pid": os.getpid(), "host": socket.gethostname()}
        self._lines.append({**start, "started": self._now_wall()})
        if heartbeat:
            self._beating = threading.Thread(target=self._beat_until_stopped, name="stoker-clock", daemon=True)
            self._beating.start()

    @property
    def current(self) -> str:
        """The phase that time goes to now."""
        return self._phases[-1]

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Give the time inside to `name`, and afterwards to the phase around it again."""
        if name not in PHASES:
            raise ValueError(f"unknown phase {name!r}; the phases are {', '.join(PHASES)}")
        with self._lock:
            self._cut()
            self._phases.append(name)
        try:
            with self.around(name):
                yield
        finally:
            with self._lock:
                try:
                    self._cut()
                finally:
                    self._phases.pop()

    def at_step(self, step: int) -> None:
        """From now on time belongs to this step; ends the setup."""
        with self._lock:
            self._cut()
            self._step = step
            self._phases[0] = "other"

    def elapsed(self) -> float:
        """Seconds since the start."""
        with self._lock:
            return self._now() / 1e9

    def totals(self) -> dict[str, float]:
        """Seconds by phase so far."""
        return {phase: ns / 1e9 for phase, ns in self.totals_ns().items()}

    def totals_ns(self) -> dict[str, int]:
        """Nanoseconds by phase so far; they sum to the elapsed time exactly."""
        with self._lock:
            totals = defaultdict(int, self._totals)
            totals[self.current] += self._now() - self._open_since
            return dict(totals)

    def sync(self) -> None:
        """Make the ledger survive a power cut; call it with each checkpoint."""
        self._lines.sync()

    def close(self) -> None:
        """End the ledger as a clean stop. Safe to call twice."""
        if self._stop.is_set():
            return
        self._stop.set()
        if self._beating is not None:
            self._beating.join()
        with self._lock:
            self._cut()
            self._lines.append({"attempt": self.attempt, "device": self.device, "closed": self._now_wall(), **memory()})
            self._lines.sync()
            self._lines.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _now(self) -> int:
        # max: some virtual machines have stepped the monotonic clock back after a migration
        self._last = max(self._last, self._monotonic_ns() - self._zero)
        return self._last

    def _now_wall(self) -> float:
        return round(self._wall(), 3)

    def _cut(self) -> None:
        """Close the open stretch and begin the next at the same instant."""
        start, now = self._open_since, self._now()
        if now == start:
            return
        self._totals[self.current] += now - start
        self._open_since = now
        line = {"attempt": self.attempt, "device": self.device, "step": self._step, "phase": self.current}
        self._lines.append({**line, "start_ns": start, "end_ns": now, "wall": self._now_wall()})

    def beat(self) -> None:
        """Say that the open stretch has lasted until now."""
        with self._lock:
            now = self._now()
            line = {"attempt": self.attempt, "device": self.device, "step": self._step, "phase": self.current}
            line |= {"start_ns": self._open_since, "beat_ns": now, "wall": self._now_wall()}
            self._lines.try_append({**line, **memory()})

    def _beat_until_stopped(self) -> None:
        while not self._stop.wait(BEAT_SECONDS):
            with self._lock:
                if self._now() - self._open_since >= BEAT_SECONDS * 1e9 / 2:
                    self.beat()
