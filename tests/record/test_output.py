"""A reader that goes away must not take the run with it."""

import io
import os
import signal
from pathlib import Path

import pytest

from stoker.record.output import Output
from stoker.rl.interrupt import Interrupt


def broken_pipe() -> io.TextIOWrapper:
    reading, writing = os.pipe()
    os.close(reading)
    return os.fdopen(writing, "w", encoding="utf-8")


def test_failure_03_output_whose_reader_is_gone_stops_the_run_cleanly() -> None:
    with Interrupt() as interrupt, broken_pipe() as stream:
        output = Output(stream)
        output.write("a row\n")
        output.flush()
        assert interrupt.received == signal.SIGHUP
        output.write("what nobody reads\n")
        output.flush()


def test_broken_output_is_an_error_where_nobody_would_stop_the_run() -> None:
    stream = broken_pipe()
    output = Output(stream)
    output.write("a row\n")
    with pytest.raises(BrokenPipeError):
        output.flush()
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    stream.close()


def test_nohup_outlives_its_terminal() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Interrupt() as interrupt:
            signal.raise_signal(signal.SIGHUP)
            assert interrupt.received is None
    finally:
        signal.signal(signal.SIGHUP, before)


def test_ascii_terminal_gets_question_marks(tmp_path: Path) -> None:
    file = tmp_path / "log"
    with file.open("w", encoding="ascii") as stream:
        Output(stream).write("5 – 6\n")
    assert file.read_text(encoding="ascii") == "5 ? 6\n"


def test_no_stream_at_all() -> None:
    output = Output(None)
    assert output.write("text") == 4
    output.flush()
