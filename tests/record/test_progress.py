import io
import json
import re

import pytest

from stoker.record.printable import printable
from stoker.record.progress import Eta, Progress, duration

HOSTILE = (
    "ok \x1b[2J\x1b]0;owned\x07\x1b]8;;http://evil\x1b\\link"
    "\x9b31m red\r\x08\x00 \u202eevil\u2069 [bold]x[/bold] \ud800 é 𝄞"
)
CLEAN = "ok link red evil [bold]x[/bold]  é 𝄞"


class FakeTime:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def shown(mode: str, records: list[dict], *, terminal: bool = False, total: int = 100) -> str:
    stream, time = io.StringIO(), FakeTime()
    with Progress(mode, total, stream=stream, terminal=terminal, width=100, now=time) as progress:  # type: ignore[arg-type]
        for record in records:
            progress.phase("sample")
            progress.advance(512, 4096, "tokens")
            time.now += 2
            progress.step(record)
        progress.warn("careful")
        progress.say("by the way")
        progress.final("done")
    return stream.getvalue()


FULL = {
    "step": 12,
    "reward/mean": 0.4119,
    "eval/a/accuracy": 0.25,
    "eval/b/accuracy": 0.35,
    "kl/mean": 0.00021,
    "optim/grad_norm": 1.2345,
    "sample/length_mean": 24.06,
    "sample/truncated": 0.03,
    "time/step": 1.917,
}


def test_a_row_shows_what_matters_under_its_title() -> None:
    lines = shown("table", [FULL]).splitlines()
    assert lines[0].split() == ["step", "reward", "held-out", "KL", "grad", "tokens", "cut", "s/step", "ETA"]
    assert lines[1].split("  ")[-1].strip() == "0:02:49"  # 88 steps of 1.917 s
    assert lines[1].replace(" %", "%").split()[:8] == [
        "12/100",
        "0.412",
        "30.0%",
        "0.0002",
        "1.234",
        "24.1",
        "3%",
        "1.92",
    ]
    assert len(lines[0]) == len(lines[1]) <= 100
    for title, value in (("reward", "0.412"), ("KL", "0.0002"), ("s/step", "1.92")):
        assert lines[0].index(title) + len(title) == lines[1].index(value) + len(value)
    assert lines[2:] == ["warning: careful", "by the way", "done"]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1e30, 123456.0, 99999.4, 999.96, -9.9996, 0.0])
def test_rows_stay_aligned_whatever_the_numbers(value: float) -> None:
    record = dict.fromkeys(FULL, value) | {"step": 100000}
    record |= {"eval/a/accuracy": 1.0, "eval/b/accuracy": 1.0, "sample/truncated": 1.0, "time/step": 9999.0}
    record |= {"sample/length_mean": 131072.0}
    header, row = shown("table", [record], total=100000).splitlines()[:2]
    assert len(row) <= len(header) + 6 <= 100


def test_missing_numbers_leave_blanks() -> None:
    header, row = shown("table", [{"step": 1}]).splitlines()[:2]
    assert row.split() == ["1/100", "–"]
    assert len(row) == len(header)


def test_without_a_terminal_there_are_no_control_codes() -> None:
    assert "\x1b" not in shown("table", [FULL, FULL | {"step": 13}])


def test_on_a_terminal_a_live_line_shows_phase_progress_and_time_left() -> None:
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown("table", [FULL, FULL | {"step": 13}], terminal=True))
    assert "step 1/100" in text
    assert "preparing" in text


def test_a_resumed_run_does_not_begin_again_at_step_1() -> None:
    progress = Progress("table", 100, stream=io.StringIO(), terminal=False, width=100)
    progress.at_step(41)
    assert "step 42/100" in progress._status().plain


def test_the_live_line_fits_100_columns() -> None:
    time = FakeTime()
    progress = Progress("table", 100000, stream=io.StringIO(), terminal=False, width=160, now=time)
    for step in range(1, 30):
        time.now += 2
        progress.step({"step": 99000 + step, "reward/mean": step / 30})
    progress.phase("sample")
    progress.advance(1_048_576, 2_097_152, "tokens")
    line = progress._status().plain
    assert len(line) <= 100
    assert "sampling" in line
    assert "━━━" in line
    assert "1,048,576/2,097,152 tokens" in line
    assert "▁▂" in line


def test_quiet_shows_only_warnings_and_the_last_words() -> None:
    assert shown("quiet", [FULL]) == "warning: careful\ndone\n"


def test_silent_shows_nothing() -> None:
    assert shown("silent", [FULL]) == ""


def test_json_gives_one_strict_object_a_line() -> None:
    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    lines = shown("json", [FULL | {"kl/mean": float("nan")}]).splitlines()
    records = [json.loads(line, parse_constant=refuse) for line in lines]
    assert records[0] == FULL | {"kl/mean": "nan"}
    assert [record.get("event") for record in records] == [None, "warning", "message", "final"]


@pytest.mark.parametrize("terminal", [False, True])
def test_failure_36_hostile_text_in_the_terminal(terminal: bool) -> None:
    stream = io.StringIO()
    with Progress("table", 1, stream=stream, terminal=terminal, width=200) as progress:
        progress.say(HOSTILE)
    assert CLEAN in stream.getvalue()
    assert "owned" not in stream.getvalue()
    assert "\x1b]" not in stream.getvalue()
    assert "\u202e" not in stream.getvalue()


def test_failure_36_control_codes_are_stripped() -> None:
    assert printable(HOSTILE) == CLEAN
    assert printable("two\nlines\tand a tab") == "two\nlines\tand a tab"
    assert printable("\x1bP1;2qdevice\x1b\\x\x1b(B\x1bc\x7f\x85y") == "xy"
    assert printable("\x1b]never closed") == "never closed"


def test_time_left_is_steps_left_times_the_median() -> None:
    eta = Eta(10)
    assert eta.seconds() is None
    now = 0.0
    for step, took in enumerate([2, 2, 100, 2, 4], start=1):
        now += took
        eta.finished(step, now, took)
    assert eta.seconds() == 5 * 2
    eta.finished(10, now + 2, 2)
    assert eta.seconds() == 0


def test_time_left_of_a_resumed_run_counts_from_its_step() -> None:
    eta = Eta(100)
    eta.finished(91, 500.0, 3.0)
    assert eta.seconds() == 27


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "–"),
        (float("inf"), "–"),
        (0.4, "0:00:00"),
        (3599.6, "1:00:00"),
        (86399, "23:59:59"),
        (183_600, "2d 03:00"),
    ],
)
def test_durations_read_well(seconds: float | None, text: str) -> None:
    assert duration(seconds) == text


def test_a_terminal_that_states_no_width_still_shows_rows() -> None:
    stream = io.StringIO()
    with Progress("table", 2, stream=stream, width=0) as progress:
        progress.final("finished")
    assert "finished" in stream.getvalue()
