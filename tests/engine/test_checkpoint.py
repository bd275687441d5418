import errno
import json
import os
import pickle
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import stoker
from stoker.engine import checkpoint
from stoker.errors import CheckpointError, RunError
from stoker.record.disk import Patience


def writer(text: str = "weights") -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / "policy").mkdir()
        (folder / "policy/model.safetensors").write_text(text)
        (folder / "state.json").write_text("{}")

    return write


def save(root: Path, step: int, keep: int = 5, text: str = "weights") -> Path:
    return checkpoint.save(root, step, writer(f"{text} {step}"), keep=keep, durable=False)


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def test_what_was_saved_is_found_with_its_environment(tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path, 7, writer(), keep=1, environment={"threads": 2})
    found = checkpoint.find(tmp_path)
    assert found is not None
    assert (found.path, found.step, found.environment, found.notes) == (path, 7, {"threads": 2}, [])
    manifest = json.loads((path / "manifest.json").read_text())
    assert manifest["schema_version"] == 1
    assert set(manifest["files"]) == {"policy/model.safetensors", "state.json"}
    assert manifest["files"]["state.json"]["bytes"] == 2
    assert checkpoint.size(path / "policy") == len("weights")


def test_no_folder_and_an_empty_folder_hold_nothing(tmp_path: Path) -> None:
    assert checkpoint.find(tmp_path / "none") is None
    assert checkpoint.find(tmp_path) is None


def test_the_newest_by_number_wins_and_the_oldest_go(tmp_path: Path) -> None:
    for step in (8, 9, 10, 11):
        save(tmp_path, step, keep=2)
    assert names(tmp_path) == ["step_10", "step_11"]
    found = checkpoint.find(tmp_path)
    assert found is not None
    assert found.step == 11


def test_at_least_one_must_stay(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least one"):
        save(tmp_path, 1, keep=0)


def test_the_same_step_saved_again_replaces_it(tmp_path: Path) -> None:
    save(tmp_path, 3, text="old")
    path = save(tmp_path, 3, text="new")
    assert (path / "policy/model.safetensors").read_text() == "new 3"
    assert names(tmp_path) == ["step_3"]


def test_a_writer_that_fails_leaves_everything_as_it_was(tmp_path: Path) -> None:
    save(tmp_path, 1)

    def broken(folder: Path) -> None:
        (folder / "half").write_text("x")
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        checkpoint.save(tmp_path, 2, broken, keep=1)
    assert names(tmp_path) == ["step_1"]


def test_failure_01_killed_while_saving_leaves_a_temporary_folder(tmp_path: Path) -> None:
    save(tmp_path, 30)
    writer()(make(tmp_path / ".step_40.tmp-123"))
    said: list[str] = []
    found = checkpoint.find(tmp_path, said.append)
    assert found is not None
    assert found.step == 30
    assert found.notes == said == ["step 40 incomplete, resuming 30"]
    assert names(tmp_path) == ["step_30"]


def make(folder: Path) -> Path:
    folder.mkdir()
    return folder


def test_failure_01_killed_in_the_very_first_save(tmp_path: Path) -> None:
    writer()(make(tmp_path / ".step_10.tmp-123"))
    said: list[str] = []
    assert checkpoint.find(tmp_path, said.append) is None
    assert said == ["step 10 incomplete, starting from the beginning"]


def test_failure_01_killed_just_before_the_rename_loses_nothing(tmp_path: Path) -> None:
    save(tmp_path, 30)
    save(tmp_path, 40).rename(tmp_path / ".step_40.tmp-123")
    found = checkpoint.find(tmp_path)
    assert found is not None
    assert (found.step, found.notes) == (40, [])


def test_failure_01_killed_while_replacing_the_same_step(tmp_path: Path) -> None:
    save(tmp_path, 40).rename(tmp_path / ".step_40.old-123")
    writer()(make(tmp_path / ".step_40.tmp-123"))
    found = checkpoint.find(tmp_path)
    assert found is not None
    assert found.step == 40
    assert names(tmp_path) == ["step_40"]


def test_failure_01_killed_while_deleting_an_old_one(tmp_path: Path) -> None:
    save(tmp_path, 20).rename(tmp_path / ".step_20.gone-123")
    save(tmp_path, 30)
    found = checkpoint.find(tmp_path)
    assert found is not None
    assert (found.step, found.notes) == (30, [])
    assert names(tmp_path) == ["step_30"]


SAVE_FOREVER = """
import sys
from pathlib import Path
from stoker.engine import checkpoint
step = int(sys.argv[2])
def write(folder):
    for i in range(20):
        (folder / f"part_{i}.safetensors").write_bytes(bytes([step % 256]) * 20000)
while True:
    step += 1
    checkpoint.save(Path(sys.argv[1]), step, write, keep=2)
    print(step, flush=True)
"""


def test_failure_01_real_kills_at_any_moment_never_lose_a_finished_save(tmp_path: Path) -> None:
    source = str(Path(next(iter(stoker.__path__))).parent)
    rng, reached = random.Random(0), 0
    for _ in range(6):
        child = subprocess.Popen(
            [sys.executable, "-c", SAVE_FOREVER, str(tmp_path), str(reached)],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": source},
        )
        assert child.stdout is not None
        child.stdout.readline()
        time.sleep(rng.uniform(0, 0.05))
        child.send_signal(signal.SIGKILL)
        rest, _ = child.communicate()
        confirmed = max([reached + 1, *map(int, rest.split())])
        found = checkpoint.find(tmp_path)
        assert found is not None
        assert confirmed <= found.step <= confirmed + 1
        reached = found.step
        assert {path.read_bytes()[0] for path in found.path.glob("part_*")} == {reached % 256}
        assert not any(name.startswith((".", "corrupt")) for name in names(tmp_path))


def patient(warnings: list[str] | None = None, deadline: float = 0.0) -> Patience:
    return Patience(deadline=deadline, pause=0, warn=(warnings if warnings is not None else []).append)


def test_failure_04_disk_full_keeps_the_old_checkpoint_and_stops(tmp_path: Path) -> None:
    save(tmp_path, 30)

    def full(folder: Path) -> None:
        (folder / "half").write_text("x")
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(RunError, match=r"disk full: checkpoint step_40 \(last good: step_30\).*--resume"):
        checkpoint.save(tmp_path, 40, full, keep=1, patience=patient())
    assert names(tmp_path) == ["step_30"]


def test_failure_04_disk_full_for_a_while(tmp_path: Path) -> None:
    tries, warnings = [], []

    def full_twice(folder: Path) -> None:
        tries.append(1)
        if len(tries) < 3:
            raise RuntimeError("I/O error: No space left on device (os error 28)")
        writer()(folder)

    checkpoint.save(tmp_path, 40, full_twice, keep=1, patience=patient(warnings, deadline=60))
    assert names(tmp_path) == ["step_40"]
    assert len(warnings) == 1
    assert "last good: none yet" in warnings[0]


@pytest.mark.parametrize("expected", [0, 500])
def test_failure_04_space_is_asked_for_before_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, expected: int
) -> None:
    save(tmp_path, 30)  # a few hundred bytes with its manifest: what the next is taken to need
    monkeypatch.setattr(checkpoint, "free_bytes", lambda path: 100)
    written: list[Path] = []
    with pytest.raises(RunError, match="disk full"):
        checkpoint.save(tmp_path, 40, written.append, keep=1, expected_bytes=expected, patience=patient())
    assert written == []
    assert names(tmp_path) == ["step_30"]


DAMAGE: dict[str, Callable[[Path], object]] = {
    "does not match its recorded hash": lambda p: (p / "policy/model.safetensors").write_text("weightz 40"),
    "has 3 bytes instead of 10": lambda p: (p / "policy/model.safetensors").write_text("wei"),
    "state.json is missing": lambda p: (p / "state.json").unlink(),
    "has no manifest.json": lambda p: (p / "manifest.json").unlink(),
    "can't be read": lambda p: (p / "manifest.json").write_text('{"schema_version": 1, "files": '),
    "has schema_version 9": lambda p: (p / "manifest.json").write_text('{"schema_version": 9, "files": {}}'),
}


@pytest.mark.parametrize("reason", DAMAGE)
def test_failure_29_corrupt_checkpoint_is_quarantined_and_the_previous_used(tmp_path: Path, reason: str) -> None:
    save(tmp_path, 30)
    DAMAGE[reason](save(tmp_path, 40))
    found = checkpoint.find(tmp_path)
    assert found is not None
    assert found.step == 30
    assert len(found.notes) == 1
    assert found.notes[0].startswith("step 40 damaged, resuming 30: ")
    assert reason in found.notes[0]
    assert found.notes[0].endswith("kept as corrupt_step_40")
    assert names(tmp_path) == ["corrupt_step_40", "step_30"]


def test_failure_29_the_same_step_corrupt_twice_keeps_both(tmp_path: Path) -> None:
    save(tmp_path, 30)
    for _ in range(2):
        (save(tmp_path, 40) / "state.json").unlink()
        checkpoint.find(tmp_path)
    assert names(tmp_path) == ["corrupt_step_40", "corrupt_step_40_2", "step_30"]


def test_failure_29_never_starts_over_silently_when_all_are_corrupt(tmp_path: Path) -> None:
    (save(tmp_path, 40) / "state.json").unlink()
    with pytest.raises(CheckpointError, match=r"no sound checkpoint is left.*state\.json is missing"):
        checkpoint.find(tmp_path)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("pytorch_model.bin", b"anything"),
        ("optimizer.pt", b"anything"),
        ("harmless.json", pickle.dumps({"a": 1})),
        ("weights", b"PK\x03\x04rest"),
    ],
)
def test_failure_39_pickle_in_a_checkpoint(tmp_path: Path, name: str, content: bytes) -> None:
    path = save(tmp_path, 40)
    (path / "policy" / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=f"{name} is a pickle file.*only loads safetensors and JSON"):
        checkpoint.find(tmp_path)
    assert names(tmp_path) == ["step_40"]


def test_failure_39_pickles_are_not_written_either(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"optimizer\.pt is a pickle file"):
        checkpoint.save(tmp_path, 1, lambda folder: (folder / "optimizer.pt").write_bytes(b"x") and None, keep=1)


def test_a_safetensors_header_length_is_not_taken_for_a_pickle(tmp_path: Path) -> None:
    header = (0x0280).to_bytes(8, "little")  # a header of 640 bytes starts like pickle protocol 2
    checkpoint.save(tmp_path, 1, lambda f: (f / "m.safetensors").write_bytes(header) and None, keep=1, durable=False)
    assert checkpoint.find(tmp_path) is not None


@pytest.mark.parametrize(
    ("step_s", "save_s", "steps"),
    [(10.0, 1.0, 5), (1.0, 1.0, 49), (100.0, 1.0, 1), (2.0, 0.0, 1), (0.0, 5.0, 1), (0.01, 0.3, 1470)],
)
def test_the_interval_keeps_saving_within_2_percent(step_s: float, save_s: float, steps: int) -> None:
    n = checkpoint.interval(step_s, save_s)
    assert n == steps
    if step_s:
        assert save_s <= 0.02 * (n * step_s + save_s) + 1e-9


@pytest.mark.parametrize("kind", ["deep", "folder"])
def test_failure_29_a_manifest_that_is_no_manifest(tmp_path: Path, kind: str) -> None:
    save(tmp_path, 1, keep=2)
    manifest = save(tmp_path, 2, keep=2) / "manifest.json"
    if kind == "deep":
        manifest.write_text("[" * 100_000)
    else:
        manifest.unlink()
        manifest.mkdir()
    found = checkpoint.find(tmp_path)
    assert found is not None
    assert found.step == 1


def test_a_file_under_the_name_of_a_checkpoint_gives_way(tmp_path: Path) -> None:
    (tmp_path / "step_3").write_text("x")
    (tmp_path / "step_4.bak").mkdir()
    assert checkpoint.find(tmp_path) is None
    save(tmp_path, 3, keep=1)
    save(tmp_path, 5, keep=1)
    assert names(tmp_path) == ["step_4.bak", "step_5"]
