"""Checkpoints that are whole or not there: a kill, a full disk or a bad sector never costs more than one.

`step_N/` appears by one rename, after every file was written, flushed to the disk and listed with its hash
in manifest.json. Whatever has another name is not a checkpoint:

    .step_N.tmp-PID       being written      complete (the kill came before the rename): kept; else removed
    .step_N.old-PID       being replaced     the same
    .step_N.gone-PID      being deleted      removed
    corrupt_step_N        quarantined        left for the user to look at
"""

import errno
import hashlib
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stoker.dotted import nearest
from stoker.errors import CheckpointError
from stoker.record.disk import Patience, free_bytes, fsync_path, gigabytes, when_full, write_json

__all__ = ["Found", "find", "interval", "policy_folder", "save", "saved", "size", "verify"]

SCHEMA_VERSION = 1
MANIFEST = "manifest.json"
_NAME = re.compile(r"step_(\d+)")
_LEFTOVER = re.compile(r"\.step_(\d+)\.(tmp|old|gone)-\d+")
_PICKLE_NAMES = (".pt", ".pth", ".bin", ".pkl", ".pickle", ".ckpt", ".joblib", ".npy", ".npz", ".dill")
_PICKLE_STARTS = (*(b"\x80" + bytes([protocol]) for protocol in range(2, 6)), b"PK\x03\x04")
"""Pickle protocols 2 to 5, and the zip archive in which PyTorch hides one."""


@dataclass(frozen=True)
class Found:
    """A checkpoint that passed every check."""

    path: Path
    step: int
    environment: Mapping[str, Any]
    """What it was written on (see `stoker.record.environment`)."""
    notes: list[str]
    """What the user should know: incomplete or damaged checkpoints that were passed over."""


def interval(step_seconds: float, save_seconds: float, share: float = 0.02) -> int:
    """Steps between checkpoints, so that saving takes at most `share` of the time: s <= share * (n t + s)."""
    if step_seconds <= 0:
        return 1
    return max(1, math.ceil(save_seconds * (1 - share) / (share * step_seconds)))


def size(path: Path) -> int:
    """Bytes of all files under a folder."""
    return sum(file.stat().st_size for file in _files(path))


def save(
    checkpoints: Path,
    step: int,
    write: Callable[[Path], None],
    *,
    keep: int,
    environment: Mapping[str, Any] | None = None,
    expected_bytes: int = 0,
    patience: Patience | None = None,
    durable: bool = True,
) -> Path:
    """Let `write` fill a folder, make it `step_N`, then delete the oldest beyond `keep`.

    On a full disk the half-written folder is removed, older checkpoints stay, and the save is repeated until
    the patience ends in RunError. `expected_bytes` (0: the size of the last checkpoint) is asked for before
    writing starts. `durable=False` skips the flushes to the disk, for tests. `write` may run more than once.
    """
    if keep < 1:
        raise ValueError(f"keep = {keep}: at least one checkpoint must stay")
    patience = patience or Patience()
    final = checkpoints / f"step_{step}"
    temporary = checkpoints / f".step_{step}.tmp-{os.getpid()}"
    checkpoints.mkdir(parents=True, exist_ok=True)
    needed = expected_bytes or max((size(path) for _, path in saved(checkpoints)[:1]), default=0)
    last = next((f"step_{number}" for number, _ in saved(checkpoints)), "none yet")

    def attempt() -> None:
        _require_space(checkpoints, needed)
        try:
            temporary.mkdir()
            write(temporary)
            _seal(temporary, step, environment or {}, durable)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise

    when_full(attempt, f"checkpoint step_{step} (last good: {last})", checkpoints, patience)
    _put_in_place(temporary, final, durable)
    for _, path in saved(checkpoints)[keep:]:
        if path != final:
            _delete(path)
    return final


def find(checkpoints: Path, say: Callable[[str], None] | None = None) -> Found | None:
    """The newest sound checkpoint, after clearing what kills left behind; None where none was ever finished.

    Notes go to `say` and, where a checkpoint is found, into `Found.notes`. A damaged one is renamed to
    `corrupt_step_N` and the one before it used. Raises CheckpointError where all are damaged, or where one
    holds a pickle file.
    """
    incomplete = _clear_leftovers(checkpoints)
    damaged: dict[int, str] = {}
    found: tuple[int, Path, dict[str, Any]] | None = None
    for step, path in saved(checkpoints):
        refuse_pickles(path)
        try:
            found = step, path, verify(path)
            break
        except CheckpointError as error:
            damaged[step] = f"{error}; kept as {_quarantine(path).name}"
    going_on = f"resuming {found[0]}" if found else "starting from the beginning"
    notes = [f"step {step} incomplete, {going_on}" for step in incomplete if found is None or step > found[0]]
    notes += [f"step {step} damaged, {going_on}: {reason}" for step, reason in damaged.items()]
    if say is not None:
        for note in notes:
            say(note)
    if found is None and damaged:
        raise CheckpointError(
            f"no sound checkpoint is left in {checkpoints}: " + " | ".join(damaged.values()) + ". "
            "Restore one from a copy, or start a new run under another name"
        )
    return Found(found[1], found[0], found[2]["environment"], notes) if found else None


def policy_folder(path: Path) -> Path:
    """The Hugging Face (or peft) folder of a run, of one of its checkpoints, or the path itself."""
    if not path.is_dir():
        beside = [folder.name for folder in path.parent.iterdir() if folder.is_dir()] if path.parent.is_dir() else []
        raise CheckpointError(f"there is no folder {path}{nearest(path.name, beside)}")
    newest = [folder / "policy" for _, folder in saved(path / "checkpoints")]
    for candidate in (path / "policy", *newest, path):
        if (candidate / "config.json").is_file() or (candidate / "adapter_config.json").is_file():
            return candidate
    raise CheckpointError(f"{path} holds no model: give a run folder, a checkpoints/step_N folder or a model folder")


def verify(path: Path) -> dict[str, Any]:
    """The manifest of a checkpoint whose files are all there and unchanged. Raises CheckpointError otherwise."""
    manifest_path = path / MANIFEST
    try:
        manifest = json.loads(manifest_path.read_bytes())
        version, files = manifest["schema_version"], dict(manifest["files"])
        facts = {name: (entry["bytes"], entry["sha256"]) for name, entry in files.items()}
    except FileNotFoundError:
        raise CheckpointError(f"{path} has no {MANIFEST}: it was not written to its end") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{manifest_path} can't be read ({error!r})") from error
    if version != SCHEMA_VERSION:
        raise CheckpointError(f"{manifest_path} has schema_version {version}, this stoker reads {SCHEMA_VERSION}")
    for name, (count, digest) in facts.items():
        file = path / name
        if not file.is_file():
            raise CheckpointError(f"{file} is missing")
        if file.stat().st_size != count:
            raise CheckpointError(f"{file} has {file.stat().st_size} bytes instead of {count}")
        if _sha256(file) != digest:
            raise CheckpointError(f"{file} does not match its recorded hash")
    return dict(manifest)


def refuse_pickles(path: Path) -> None:
    """Raise CheckpointError if any file under path is, or is named like, a pickle: loading one can run code."""
    for file in _files(path):
        with file.open("rb") as opened:
            start = opened.read(4)
        # a safetensors file starts with its header's length, which may look like anything
        looks_so = start.startswith(_PICKLE_STARTS) and file.suffix != ".safetensors"
        if looks_so or file.suffix.lower() in _PICKLE_NAMES:
            raise CheckpointError(
                f"{file} is a pickle file, which can run any code when loaded; stoker only loads safetensors and JSON. "
                "Delete the file if you did not put it there; convert it to safetensors if you did"
            )


def _files(path: Path) -> Iterator[Path]:
    return (file for file in sorted(path.rglob("*")) if file.is_file())


def saved(checkpoints: Path) -> list[tuple[int, Path]]:
    """(step, folder) of all under their final name, newest first."""
    names = checkpoints.iterdir() if checkpoints.is_dir() else ()
    found = [(int(match[1]), path) for path in names if (match := _NAME.fullmatch(path.name)) and path.is_dir()]
    return sorted(found, reverse=True)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _require_space(checkpoints: Path, needed: int) -> None:
    free = free_bytes(checkpoints)
    if free < needed:
        raise OSError(errno.ENOSPC, f"{gigabytes(needed)} needed, {gigabytes(free)} free", str(checkpoints))


def _seal(folder: Path, step: int, environment: Mapping[str, Any], durable: bool) -> None:
    """Flush everything, then write the manifest: its presence says that the rest is complete."""
    refuse_pickles(folder)
    files = {
        file.relative_to(folder).as_posix(): {"bytes": file.stat().st_size, "sha256": _sha256(file)}
        for file in _files(folder)
    }
    if durable:
        for path in [*folder.rglob("*"), folder]:
            fsync_path(path)
    write_json(folder / MANIFEST, {"step": step, "files": files, "environment": environment})


def _put_in_place(temporary: Path, final: Path, durable: bool) -> None:
    old = final.with_name(f".{final.name}.old-{os.getpid()}")
    if final.exists():  # the same step saved again: the old one stays findable until the new one has its name
        final.rename(old)
    temporary.rename(final)
    if durable:
        fsync_path(final.parent)
    if old.exists():
        _delete(old)


def _delete(path: Path) -> None:
    """Rename first: were the run killed midway, half a checkpoint must not be taken for one."""
    if not path.is_dir():  # something else that was put under a checkpoint's name
        path.unlink()
        return
    step = re.search(r"step_\d+", path.name)
    gone = path.with_name(f".{step[0] if step else path.name}.gone-{os.getpid()}")
    path.rename(gone)
    shutil.rmtree(gone, ignore_errors=True)


def _clear_leftovers(checkpoints: Path) -> list[int]:
    """Finish or remove what a kill left half done. Returns the steps whose saves were incomplete."""
    incomplete: list[int] = []
    leftovers = sorted(checkpoints.glob(".step_*")) if checkpoints.is_dir() else []
    for path in leftovers:
        match = _LEFTOVER.fullmatch(path.name)
        if not match:
            continue
        step, kind = int(match[1]), match[2]
        final = checkpoints / f"step_{step}"
        if kind != "gone" and not final.exists() and _sound(path):
            path.rename(final)
            continue
        if kind == "tmp" and not final.exists():
            incomplete.append(step)
        shutil.rmtree(path)
    return incomplete


def _sound(path: Path) -> bool:
    try:
        verify(path)
    except CheckpointError:
        return False
    return True


def _quarantine(path: Path) -> Path:
    target = path.with_name(f"corrupt_{path.name}")
    number = 2
    while target.exists():
        target = path.with_name(f"corrupt_{path.name}_{number}")
        number += 1
    return path.rename(target)
