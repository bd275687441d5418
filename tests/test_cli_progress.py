"""What is told while the command line works."""

import pytest

from stoker.batch.certificate import Trial
from stoker.cli_progress import parts, trial


def test_a_part_is_told_with_the_time_so_far_and_what_is_left(capsys: pytest.CaptureFixture[str]) -> None:
    times = iter([100.0, 101.0, 101.5, 104.0, 165.0])
    tell = parts(now=lambda: next(times))
    tell("at once", None)
    tell("and soon over", 1.0)
    tell("target \x1b[31mred", None)
    tell("half", 3600.0)
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.splitlines()[-1] == "0:01:05  half; about 1:00:00 left"
    assert [line.split("  ")[0] for line in told.err.splitlines()] == ["0:00:04", "0:01:05"]
    assert "\x1b" not in told.err


def test_a_trial_is_told_with_how_many_follow(capsys: pytest.CaptureFixture[str]) -> None:
    trial(Trial(1024, "ran", 3, 2**20, 0.1, 4.2, None, ""), 10)
    assert capsys.readouterr().err == "1,024: ran, peak 1.0 MiB, 4.2 s; about 10 more, 0:00:42\n"
