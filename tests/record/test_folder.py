import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import stoker
from stoker.errors import RunError
from stoker.record.folder import RunFolder

SOURCE = str(Path(next(iter(stoker.__path__))).parent)
HOLD = """
import sys, time
from stoker.record.folder import RunFolder
folder = RunFolder.create(sys.argv[1], sys.argv[2], resume=False)
print("held", flush=True)
time.sleep(60)
"""


def hold_in_another_process(runs: Path, name: str) -> subprocess.Popen[str]:
    child = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(runs), name],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": SOURCE},
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "held\n"
    return child


def stop(child: subprocess.Popen[str]) -> None:
    child.kill()
    child.communicate()


def test_a_fresh_run_gets_its_folders_and_attempt_1(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path / "runs", "a.b_c-1", resume=False) as folder:
        assert folder.path == (tmp_path / "runs/a.b_c-1").resolve()
        assert folder.checkpoints.is_dir()
        assert folder.samples.is_dir()
        assert folder.name == "a.b_c-1"
        assert folder.attempt == 1


def test_each_start_is_one_attempt_more_whichever_log_saw_the_last(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path, "run", resume=False) as folder:
        (folder.path / "metrics.jsonl").write_text('{"schema_version":1}\n{"step":1,"attempt":1}\n{"step":2,"att')
        (folder.path / "clock.jsonl").write_text('{"schema_version":1}\n{"attempt":2}\n')
    with RunFolder.create(tmp_path, "run", resume=True) as folder:
        assert folder.attempt == 3


def test_a_fresh_run_never_writes_over_results(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path, "run", resume=False) as folder:
        (folder.path / "metrics.jsonl").write_text('{"schema_version":1}\n{"step":1,"attempt":1}\n')
    with pytest.raises(RunError, match="already has results.*--resume"):
        RunFolder.create(tmp_path, "run", resume=False)
    RunFolder.create(tmp_path, "run", resume=True).release()  # and the refusal left no lock behind


def test_a_run_that_never_finished_a_step_can_be_started_afresh(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path, "run", resume=False) as folder:
        (folder.path / "metrics.jsonl").write_text('{"schema_version":1,"kind":"metrics"}\n')
    with RunFolder.create(tmp_path, "run", resume=False):
        pass


def test_there_must_be_something_to_resume(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="no run 'run'.*without --resume"):
        RunFolder.create(tmp_path, "run", resume=True)
    assert not (tmp_path / "run").exists()


def test_require_free_names_what_and_how_much(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stoker.record.folder.free_bytes", lambda path: 3_000_000)
    with RunFolder.create(tmp_path, "run", resume=False) as folder:
        folder.require_free(3_000_000, "two checkpoints")
        with pytest.raises(RunError, match=r"two checkpoints needs 2\.50 GB, but .* has 3 MB free"):
            folder.require_free(2_500_000_000, "two checkpoints")


@pytest.mark.parametrize(
    "name", ["../up", "..", ".", "a/b", "/abs", "a..b", "", "a b", "a\x00b", ".hidden", "é", "a\n"]
)
def test_failure_40_run_name_leads_out(tmp_path: Path, name: str) -> None:
    with pytest.raises(RunError, match="is not allowed: use letters, digits"):
        RunFolder.create(tmp_path / "runs", name, resume=False)
    assert not (tmp_path / "runs").exists()


def test_failure_40_run_folder_is_a_link_leading_out(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs/run").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RunError, match="leads out of"):
        RunFolder.create(tmp_path / "runs", "run", resume=False)
    assert not any((tmp_path / "elsewhere").iterdir())


def test_failure_05_run_folder_unwritable(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("a file where the folder should be")  # holds for root too, unlike permissions
    with pytest.raises(RunError, match=r"can't be written \(.+\); fix its permissions or choose another runs_dir"):
        RunFolder.create(tmp_path / "runs", "run", resume=False)


def test_failure_05_disk_refuses_a_first_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read_only(self: Path, data: bytes) -> int:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(Path, "write_bytes", read_only)
    with pytest.raises(RunError, match="Read-only file system"):
        RunFolder.create(tmp_path, "run", resume=False)


def test_failure_43_two_runs_in_one_folder(tmp_path: Path) -> None:
    child = hold_in_another_process(tmp_path, "run")
    try:
        with pytest.raises(RunError, match=rf"run run is in use by pid {child.pid} on host {os.uname().nodename}"):
            RunFolder.create(tmp_path, "run", resume=True)
    finally:
        stop(child)
    assert child.returncode == -signal.SIGKILL
    with RunFolder.create(tmp_path, "run", resume=True) as folder:  # the killed owner's lock is gone with it
        assert json.loads((folder.path / ".lock").read_text())["pid"] == os.getpid()


def test_failure_43_the_same_process_is_no_exception(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path, "run", resume=False), pytest.raises(RunError, match=f"pid {os.getpid()}"):
        RunFolder.create(tmp_path, "run", resume=True)


def test_a_forked_worker_that_outlives_the_run_does_not_keep_it_locked(tmp_path: Path) -> None:
    program = HOLD.replace('print("held"', 'import os; pid = os.fork()\nprint("held", pid or os.getpid()')
    child = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", program, str(tmp_path), "run"],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": SOURCE},
    )
    assert child.stdout is not None
    worker = int(child.stdout.readline().split()[1])
    child.stdout.readline()
    child.kill()
    child.wait()
    try:
        RunFolder.create(tmp_path, "run", resume=True).release()
    finally:
        os.kill(worker, signal.SIGKILL)
        child.stdout.close()
