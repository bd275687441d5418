import errno
import json
from pathlib import Path

import pytest

from stoker.errors import RunError
from stoker.record.disk import Patience, gigabytes, is_full, when_full, write_json, write_text


class FakeTime:
    def __init__(self) -> None:
        self.now = 0.0

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def patience(time: FakeTime, warnings: list[str]) -> Patience:
    return Patience(deadline=60, pause=5, warn=warnings.append, sleep=time.sleep, now=lambda: time.now)


def test_failure_04_waits_for_space_and_goes_on(tmp_path: Path) -> None:
    time, warnings, tries = FakeTime(), [], 0

    def action() -> str:
        nonlocal tries
        tries += 1
        if tries < 4:
            raise OSError(errno.ENOSPC, "No space left on device")
        return "done"

    assert when_full(action, "metrics.jsonl", tmp_path, patience(time, warnings)) == "done"
    assert time.now == 15
    assert len(warnings) == 1
    assert warnings[0].startswith("disk full: metrics.jsonl is waiting for space (")
    assert "make room within 60 s" in warnings[0]


def test_failure_04_gives_up_at_the_deadline(tmp_path: Path) -> None:
    time = FakeTime()

    def action() -> None:
        raise RuntimeError("I/O error: No space left on device (os error 28)")  # as Rust libraries say it

    with pytest.raises(RunError, match="disk full: metrics.jsonl could not be written for 60 s .*--resume"):
        when_full(action, "metrics.jsonl", tmp_path, patience(time, []))
    assert time.now == 60


def test_other_errors_pass_at_once(tmp_path: Path) -> None:
    time = FakeTime()

    def action() -> None:
        raise PermissionError("no")

    with pytest.raises(PermissionError):
        when_full(action, "x", tmp_path, patience(time, []))
    assert time.now == 0


def test_a_quota_is_a_full_disk_too() -> None:
    assert is_full(OSError(errno.EDQUOT, "Disk quota exceeded"))
    assert is_full(RuntimeError("I/O error: Disk quota exceeded (os error 122)"))  # as safetensors says it
    assert not is_full(OSError(errno.EACCES, "Permission denied"))


def test_a_failed_write_leaves_the_old_text(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    write_text(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_text(path, "new \ud800")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_json_names_its_schema_first(tmp_path: Path) -> None:
    write_json(tmp_path / "plan.json", {"b": 1, "a": "é"})
    text = (tmp_path / "plan.json").read_text(encoding="utf-8")
    assert list(json.loads(text)) == ["schema_version", "b", "a"]
    assert "é" in text


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (12_345, "12 kB"), (310e6, "310 MB"), (1.239e9, "1.24 GB"), (2e12, "2000.00 GB")]
)
def test_sizes_read_well(count: float, text: str) -> None:
    assert gigabytes(count) == text


def test_failure_04_a_stop_signal_ends_the_wait_for_space(tmp_path: Path) -> None:
    def full() -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(RunError, match="disk full: checkpoint could not be written for 0 s"):
        when_full(full, "checkpoint", tmp_path, Patience(called_off=lambda: True))
