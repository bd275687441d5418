"""Real processes, and how each of their ends is read."""

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from stoker.batch.target import Maker
from stoker.batch.trials import Ending, Trials, _ending, _together, least_memory
from stoker.errors import ConfigError, RunError

TARGETS = str(Path(__file__).with_name("fit_targets.py"))
MIB = 2**20

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="address space is limited on Linux")


def trials(name: str, *arguments: str, **options: object) -> Trials:
    return Trials(Maker(f"{TARGETS}:{name}", arguments), **options)


def test_runs_and_says_what_it_took() -> None:
    ending = trials("plain").try_size(32, 400 * MIB)
    assert ending.end == "ran"
    assert ending.told["steps"] == 2
    assert ending.told["batch"] == ["32 x 262144 float32"]
    assert 32 * MIB < ending.told["peak_bytes"] < 400 * MIB
    assert ending.told["parts"]["weights"] == 4


def test_real_out_of_memory() -> None:
    ending = trials("plain").try_size(1000, 400 * MIB)
    assert ending.end == "out of memory"
    assert "can't allocate memory" in ending.reason


def test_peer_fault_25_another_error_surfaces_at_once_with_its_traceback() -> None:
    with pytest.raises(RunError, match="not for memory") as caught:
        trials("broken", "1").try_size(4, None)
    assert "mat1 and mat2 shapes cannot be multiplied" in str(caught.value)
    assert 'fit_targets.py", line' in str(caught.value)


def test_peer_fault_25_host_memory_exhausted_is_said_as_such() -> None:
    """SIGKILL is how the kernel ends a process, or a loader's worker, where the host has no memory."""
    ending = trials("killed", "1").try_size(4, None)
    assert ending.end == "killed"
    assert "killed by the operating system (SIGKILL) in step 1: the host's memory ran out" in ending.reason


def test_a_crash_under_the_limit_is_settled_without_it() -> None:
    ending = trials("crashes", "1", "SIGSEGV").try_size(4, 400 * MIB)
    assert ending.end == "out of memory"
    assert "SIGSEGV in step 1; without the limit it runs" in ending.reason


@pytest.mark.parametrize("limit", [None, 400 * MIB])
def test_words_in_doubt_are_never_read_as_out_of_memory_alone(
    limit: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are what a shape that oneDNN refuses gives too: it fails again without the limit, or there is none."""
    doubt = Ending("doubtful", {}, "RuntimeError: could not create a primitive", "Traceback ...")
    limits: list[int | None] = []

    def run(self: Trials, ranks: int, request: dict[str, Any]) -> list[Ending]:
        limits.append(request["limit_bytes"])
        return [doubt]

    monkeypatch.setattr(Trials, "_run", run)
    with pytest.raises(RunError, match=r"not surely for memory.*could not create a primitive\nTraceback"):
        trials("plain").try_size(4, limit)
    assert limits == ([None] if limit is None else [limit, None])


def test_a_trial_that_is_late_is_ended() -> None:
    ending = trials("slow", "1", deadline_seconds=4).try_size(4, None)
    assert ending.end == "deadline"
    assert "not done by its deadline, " in ending.reason


def test_peer_fault_25_ranks_side_by_side_run_where_all_run() -> None:
    ending = trials("by_rank", "8", "3", ranks=2).try_size(4, None)
    assert (ending.end, ending.reason) == ("out of memory", "MemoryError: more than 3")


def folder_with(folder: Path, lines: str = "", output: str = "") -> Path:
    (folder / "output-0").write_text(output, encoding="utf-8")
    (folder / "lines-0").write_text(lines, encoding="utf-8")
    return folder


def test_ends_of_a_process_that_left_no_last_line(tmp_path: Path) -> None:
    at = '{"at": "made"}\n{"at": "step 2"}\n{"at": "st'  # the last line torn
    assert _ending(folder_with(tmp_path, at), 0, -signal.SIGKILL, "").end == "killed"
    crashed = _ending(folder_with(tmp_path, at, "terminate called: std::bad_alloc"), 0, -signal.SIGABRT, "")
    assert (crashed.end, crashed.reason) == (
        "out of memory",
        "ended by SIGABRT in step 2: terminate called: std::bad_alloc",
    )
    assert _ending(folder_with(tmp_path, at), 0, -signal.SIGABRT, "").end == "doubtful"
    assert _ending(folder_with(tmp_path), 0, 1, "").reason == "exit status 1 in the making of the target"
    assert _ending(folder_with(tmp_path, at), 0, -signal.SIGKILL, "stopped").end == "stopped"


def test_ranks_agree_on_the_worst() -> None:
    def ran(peak: int, seconds: float) -> Ending:
        return Ending("ran", {"peak_bytes": peak, "seconds_per_step": seconds, "steps": 2}, "", "")

    both = _together([ran(5, 2.0), ran(7, 1.0)])
    assert both.told == {"peak_bytes": 7, "seconds_per_step": 2.0, "steps": 2}
    lost = Ending("error", {}, "Connection closed by peer", "")
    out = Ending("out of memory", {}, "", "")
    assert _together([ran(5, 1.0), lost, out]) is out
    assert _together([ran(5, 1.0), lost]) is lost


def test_a_target_that_cannot_be_made_says_so_with_its_traceback() -> None:
    with pytest.raises(RunError, match="can't be tried") as caught:
        trials("broken_making").inspect()
    assert 'fit_targets.py", line' in str(caught.value)
    assert "KeyError: 'no such table'" in str(caught.value)


def test_words_that_the_function_does_not_take_are_said_without_a_traceback() -> None:
    with pytest.raises(ConfigError, match=r"called with \['x', 'y'\]: too many positional arguments") as caught:
        trials("broken", "x", "y").inspect()
    assert str(caught.value).count("too many") == 1
    with pytest.raises(ConfigError, match="missing a required argument: 'at'; words after TARGET"):
        trials("broken").inspect()


def test_a_target_that_ends_its_process_is_no_crash() -> None:
    """Its exit status was 0: a doubt about memory, settled by further runs of it."""
    with pytest.raises(RunError, match="can't be tried: SystemExit: 0") as caught:
        trials("exits").inspect()
    assert 'fit_targets.py", line' in str(caught.value)


def test_a_trial_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    """Its parent's SIGTERM or SIGKILL left it training until its deadline, ten minutes."""
    code = (
        "from stoker.batch.trials import Trials; from stoker.batch.target import Maker; "
        f"Trials(Maker({TARGETS + ':tells'!r}, ({str(tmp_path / 'pid')!r},))).try_size(1, None)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code])
    try:
        _until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
        child = int((tmp_path / "pid").read_text())
        assert psutil.pid_exists(child)
    finally:
        parent.kill()
        parent.wait()
    _until(lambda: not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE)


def _until(true: Callable[[], object], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it never came to that"
        time.sleep(0.02)


def test_the_users_allocator_settings_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MALLOC_ARENA_MAX", "4")
    monkeypatch.delenv("MALLOC_MMAP_THRESHOLD_", raising=False)
    assert least_memory() == {"MALLOC_ARENA_MAX": "4", "MALLOC_MMAP_THRESHOLD_": "131072"}
