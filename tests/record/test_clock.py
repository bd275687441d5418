import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import stoker
from stoker.record import clock as clock_module
from stoker.record.clock import PHASES, Clock
from stoker.record.read import Run

SECOND = 1_000_000_000


class FakeTime:
    """A monotonic and a wall clock that tests move by hand."""

    def __init__(self) -> None:
        self.ns = 5 * SECOND
        self.wall = 1_700_000_000.0

    def pass_(self, seconds: float) -> None:
        self.ns += round(seconds * SECOND)
        self.wall += seconds


def make(folder: Path, time: FakeTime, attempt: int = 1) -> Clock:
    folder.mkdir(exist_ok=True)
    (folder / "config.toml").touch()
    return Clock(
        folder / "clock.jsonl", "cpu", attempt, monotonic_ns=lambda: time.ns, wall=lambda: time.wall, heartbeat=False
    )


def test_an_inner_phase_pauses_the_outer(tmp_path: Path) -> None:
    time = FakeTime()
    clock = make(tmp_path, time)
    time.pass_(2)
    clock.at_step(1)
    with clock.phase("sample"):
        time.pass_(3)
        with clock.phase("reward"):
            time.pass_(5)
        time.pass_(7)
    time.pass_(11)
    assert clock.totals() == {"setup": 2, "sample": 10, "reward": 5, "other": 11}
    assert clock.elapsed() == 28
    clock.close()
    spans = [(span.step, span.phase, span.seconds) for span in Run.load(tmp_path).spans]
    assert spans == [(None, "setup", 2), (1, "sample", 3), (1, "reward", 5), (1, "sample", 7), (1, "other", 11)]


def test_a_phase_ends_by_an_exception_too(tmp_path: Path) -> None:
    time = FakeTime()
    with make(tmp_path, time) as clock:
        with contextlib.suppress(KeyError), clock.phase("update"):
            time.pass_(1)
            raise KeyError
        assert clock.current == "setup"
        assert clock.totals_ns() == {"setup": 0, "update": SECOND}


def test_an_unknown_phase_names_the_known_ones(tmp_path: Path) -> None:
    with (
        make(tmp_path, FakeTime()) as clock,
        pytest.raises(ValueError, match="unknown phase 'sampling'; the phases are setup, sample"),
        clock.phase("sampling"),
    ):
        pass


MOVES = st.lists(
    st.one_of(
        st.tuples(st.just("pass"), st.integers(-3 * SECOND, 10 * SECOND)),  # negative: the clock is set back
        st.tuples(st.just("enter"), st.sampled_from(sorted(PHASES))),
        st.tuples(st.just("leave"), st.none()),
        st.tuples(st.just("step"), st.integers(0, 9)),
        st.tuples(st.just("beat"), st.none()),
    ),
    max_size=40,
)


@settings(deadline=None, max_examples=60)
@given(MOVES)
def test_every_nanosecond_is_in_exactly_one_phase(moves: list) -> None:
    time, open_phases = FakeTime(), []
    with tempfile.TemporaryDirectory() as name:
        clock = make(Path(name), time)
        for move, value in moves:
            if move == "pass":
                time.ns += value
            elif move == "enter":
                open_phases.append(clock.phase(value))
                open_phases[-1].__enter__()
            elif move == "leave" and open_phases:
                open_phases.pop().__exit__(None, None, None)
            elif move == "step":
                clock.at_step(value)
            elif move == "beat":
                clock.beat()
            totals = clock.totals_ns()
            assert sum(totals.values()) == round(clock.elapsed() * SECOND)
            assert min(totals.values()) >= 0
        while open_phases:
            open_phases.pop().__exit__(None, None, None)
        clock.close()
        run = Run.load(name)
        assert {phase: ns for phase, ns in clock.totals_ns().items() if ns} == {
            phase: round(seconds * SECOND) for phase, seconds in run.seconds_by_phase().items()
        }
        edges = [0, *(span.end_ns for span in run.spans)]
        assert [span.start_ns for span in run.spans] == edges[:-1]  # no gap, no overlap


def test_failure_35_clock_jumps(tmp_path: Path) -> None:
    time = FakeTime()
    first = make(tmp_path, time)
    first.at_step(1)
    with first.phase("update"):
        time.pass_(10)
        time.wall -= 7200  # set back two hours in the middle of a phase
        time.ns -= 4 * SECOND  # and a faulty monotonic clock steps back
        first.beat()
        time.pass_(10)
    first.close()
    second = make(tmp_path, time, attempt=2)  # the wall clock still says it is earlier than attempt 1 began
    time.wall -= 100
    second.close()
    run = Run.load(tmp_path)
    assert run.seconds_by_phase() == {"update": 16}  # never below what had already passed
    assert all(span.end_ns > span.start_ns for span in run.spans)
    assert run.downtime_seconds() == 0
    assert any("attempt 1: the wall clock moved -7196 s" in note for note in run.notes)


def test_downtime_runs_from_the_last_sign_of_life(tmp_path: Path) -> None:
    time = FakeTime()
    first = make(tmp_path, time)
    time.pass_(30)
    first.beat()  # killed here: neither the phase nor the ledger is closed
    time.pass_(600)
    with make(tmp_path, time, attempt=2):
        time.pass_(5)
    run = Run.load(tmp_path)
    assert run.downtime_seconds() == pytest.approx(600)
    assert run.seconds_by_phase() == {"setup": 35}
    assert [attempt.closed for attempt in run.attempts] == [False, True]


def test_a_heartbeat_writes_only_while_a_phase_lasts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock_module, "BEAT_SECONDS", 0.05)
    with Clock(tmp_path / "clock.jsonl", "cpu", 1) as clock, clock.phase("update"):
        time.sleep(0.4)
    beats = [line for line in map(json.loads, (tmp_path / "clock.jsonl").read_text().splitlines()) if "beat_ns" in line]
    assert 2 <= len(beats) <= 8
    assert all(beat["phase"] == "update" and beat["peak_mb"] > 0 for beat in beats)
    assert len((tmp_path / "clock.jsonl").read_bytes()) < 250 * (len(beats) + 5)


def test_failure_02_a_killed_run_loses_at_most_a_second_of_its_ledger(tmp_path: Path) -> None:
    program = """
import sys, time
from pathlib import Path
from stoker.record.clock import Clock
clock = Clock(Path(sys.argv[1]) / "clock.jsonl", "cpu", 1)
clock.at_step(3)
with clock.phase("update"):
    print("ready", flush=True)
    time.sleep(60)
"""
    source = str(Path(next(iter(stoker.__path__))).parent)
    (tmp_path / "config.toml").touch()
    child = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": source},
    )
    assert child.stdout is not None
    child.stdout.readline()
    begun = time.monotonic()
    time.sleep(1.9)
    child.send_signal(signal.SIGKILL)
    lived = time.monotonic() - begun
    child.communicate()
    run = Run.load(tmp_path)
    assert lived - 1.0 <= run.seconds_by_phase()["update"] <= lived + 0.1
    assert run.spans[-1].step == 3
    story = run.last_end()
    assert story is not None
    assert f"attempt 1 (pid {child.pid} on " in story
    assert "in phase update of step 3" in story


def test_a_full_disk_costs_a_beat_but_never_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeTime()
    clock = make(tmp_path, fake)
    fake.pass_(1)

    def full(file: int, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", full)
        clock.beat()
    clock.close()
    assert Run.load(tmp_path).seconds_by_phase() == {"setup": 1}


def test_what_is_around_a_phase_is_entered_with_it_and_its_time_belongs_to_it(tmp_path: Path) -> None:
    time = FakeTime()
    clock = make(tmp_path, time)
    seen: list[str] = []

    @contextlib.contextmanager
    def around(name: str) -> Iterator[None]:
        seen.append(f"{name} begins in {clock.current}")
        yield
        time.pass_(3)
        seen.append(f"{name} ends in {clock.current}")

    clock.around = around
    with clock.phase("sample"), clock.phase("reward"):
        time.pass_(1)
    assert seen == [
        "sample begins in sample",
        "reward begins in reward",
        "reward ends in reward",
        "sample ends in sample",
    ]
    assert clock.totals() == {"setup": 0.0, "reward": 4.0, "sample": 3.0}
