import errno
import gzip
import json
import os
from pathlib import Path

import numpy as np
import pytest

from stoker.errors import RunError
from stoker.record.disk import Patience
from stoker.record.folder import RunFolder
from stoker.record.read import Run, read_samples
from stoker.record.write import Lines, Recorder, encode


@pytest.fixture
def folder(tmp_path: Path):
    with RunFolder.create(tmp_path, "run", resume=False) as folder:
        yield folder


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_step_is_one_line_under_a_header(folder: RunFolder) -> None:
    with Recorder(folder) as recorder:
        recorder.metrics(1, {"reward/mean": 0.5, "batch/prompts": 16})
    assert lines(folder.path / "metrics.jsonl") == [
        {"schema_version": 1, "kind": "metrics"},
        {"step": 1, "attempt": 1, "reward/mean": 0.5, "batch/prompts": 16},
    ]


def test_lines_are_on_file_before_append_returns(folder: RunFolder) -> None:
    recorder = Recorder(folder)
    recorder.metrics(1, {"reward/mean": 0.5})
    assert len(lines(folder.path / "metrics.jsonl")) == 2
    recorder.close()


def test_what_json_lacks_becomes_strings_and_numpy_becomes_plain() -> None:
    record = {
        "a": float("nan"),
        "b": float("inf"),
        "c": -np.inf,
        "d": np.float32(0.5),
        "e": np.int64(3),
        "f": np.ones(2),
    }
    assert json.loads(encode(record)) == {"a": "nan", "b": "inf", "c": "-inf", "d": 0.5, "e": 3, "f": [1.0, 1.0]}
    with pytest.raises(TypeError, match="a object can't be recorded"):
        encode({"x": object()})


def test_any_text_of_a_model_fits_on_one_line_and_comes_back() -> None:
    text = 'a\nb\r\x1b[31m \u2028 \x00 \\ " é 𝄞'
    line = encode({"text": text})
    assert line.count(b"\n") == 1
    assert json.loads(line)["text"] == text
    assert json.loads(encode({"text": "\ud800"}))["text"] == "\ud800"


def test_samples_are_replaced_when_a_step_is_done_again(folder: RunFolder) -> None:
    with Recorder(folder, 1) as recorder:
        recorder.samples(7, [{"id": "a", "reward": 0.0}])
    with Recorder(folder, 2) as recorder:
        path = recorder.samples(7, [{"id": "a", "reward": 1.0}, {"id": "b", "reward": None}])
    assert path == folder.samples / "step_7.jsonl.gz"
    assert read_samples(path) == [{"id": "a", "reward": 1.0}, {"id": "b", "reward": None}]
    assert json.loads(gzip.decompress(path.read_bytes()).splitlines()[0])["attempt"] == 2
    assert list(folder.samples.iterdir()) == [path]


def test_failure_02_torn_line_is_cut_before_new_ones_follow(folder: RunFolder) -> None:
    path = folder.path / "metrics.jsonl"
    with Recorder(folder, 1) as recorder:
        recorder.metrics(1, {"reward/mean": 0.5})
    with path.open("ab") as file:
        file.write(b'{"step":2,"attempt":1,"rew')
    with Recorder(folder, 2) as recorder:
        recorder.metrics(2, {"reward/mean": 0.25})
    assert [line.get("step") for line in lines(path)] == [None, 1, 2]


def test_a_log_torn_in_its_header_starts_over(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"schema')
    Lines(path, "x", Patience()).close()
    assert lines(path) == [{"schema_version": 1, "kind": "x"}]


def test_a_torn_line_longer_than_a_block_is_cut_too(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"schema_version":1}\n' + b"x" * 200_000)
    Lines(path, "x", Patience()).close()
    assert path.read_bytes() == b'{"schema_version":1}\n'


def fill_disk(monkeypatch: pytest.MonkeyPatch, writes_until_full: int, full_for: int) -> None:
    """os.write does its first calls, then half of one, then nothing `full_for` times, then all again."""
    real, calls = os.write, 0

    def write(file: int, data: bytes) -> int:
        nonlocal calls
        calls += 1
        if calls <= writes_until_full or calls > writes_until_full + 1 + full_for:
            return real(file, data)
        if calls == writes_until_full + 1:
            return real(file, bytes(data)[: len(data) // 2])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", write)


def test_failure_04_disk_full_for_a_while_loses_no_line(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    warnings: list[str] = []
    patience = Patience(deadline=60, pause=0, warn=warnings.append)
    recorder = Recorder(folder, patience=patience)
    fill_disk(monkeypatch, writes_until_full=1, full_for=3)
    for step in (1, 2, 3):
        recorder.metrics(step, {"reward/mean": step / 2})
    recorder.close()
    assert [line.get("step") for line in lines(folder.path / "metrics.jsonl")] == [None, 1, 2, 3]
    assert len(warnings) == 1


def test_failure_04_disk_full_for_good_stops_with_a_whole_record(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder(folder, patience=Patience(deadline=0, pause=0))
    fill_disk(monkeypatch, writes_until_full=1, full_for=1000)
    recorder.metrics(1, {"reward/mean": 0.5})
    with pytest.raises(RunError, match="disk full: metrics.jsonl could not be written"):
        recorder.metrics(2, {"reward/mean": 0.5})
    assert [line.get("step") for line in lines(folder.path / "metrics.jsonl")] == [None, 1]
    recorder.close()


def test_failure_04_disk_full_while_writing_samples(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Path, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    recorder = Recorder(folder, patience=Patience(deadline=0, pause=0))
    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(RunError, match=r"samples/step_3\.jsonl\.gz could not be written"):
        recorder.samples(3, [{"id": "a"}])
    assert list(folder.samples.iterdir()) == []
    recorder.close()


def test_events_keep_their_facts(folder: RunFolder) -> None:
    with Recorder(folder) as recorder:
        recorder.event("out_of_memory", "smaller micro-batch", step=4, tokens_per_microbatch=2048)
        recorder.event("start", "hello")
    first, second = Run.load(folder.path).events
    assert (first["kind"], first["message"], first["step"]) == ("out_of_memory", "smaller micro-batch", 4)
    assert first["tokens_per_microbatch"] == 2048
    assert second["step"] is None
    assert second["wall"] >= first["wall"] > 1e9


def test_failure_04_last_words_do_not_wait_for_a_full_disk(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(folder)  # its patience would last ten minutes

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("stoker.record.write.os.write", full)
        recorder.last_words("failed", "why")
    recorder.close()
