import json
from pathlib import Path

import pytest

from stoker.errors import RunError
from stoker.record.read import Run

HEADER = '{"schema_version":1}'


def run_folder(path: Path, metrics: list[dict] | None = None, clock: list[dict] | None = None, tail: str = "") -> Path:
    for name, records in (("metrics", metrics or []), ("clock", clock or [])):
        text = "\n".join([HEADER, *map(json.dumps, records)]) + "\n"
        (path / f"{name}.jsonl").write_text(text + (tail if name == "metrics" else ""))
    (path / "config.toml").write_text('name = "run"\n')
    return path


def metric(attempt: int, step: int, value: float | str = 0.0) -> dict:
    return {"step": step, "attempt": attempt, "reward/mean": value}


def start(attempt: int, wall: float) -> dict:
    return {"attempt": attempt, "device": "cpu", "pid": 100 + attempt, "host": "box", "started": wall}


def span(attempt: int, step: int | None, phase: str, start_s: float, end_s: float, wall: float) -> dict:
    ns = {"start_ns": round(start_s * 1e9), "end_ns": round(end_s * 1e9)}
    return {"attempt": attempt, "device": "cpu", "step": step, "phase": phase, **ns, "wall": wall}


def beat(attempt: int, step: int, phase: str, start_s: float, at_s: float, wall: float, **memory: int) -> dict:
    line = span(attempt, step, phase, start_s, at_s, wall)
    line["beat_ns"] = line.pop("end_ns")
    return {**line, **memory}


def test_reads_steps_in_order_with_config_and_numbers_json_lacks(tmp_path: Path) -> None:
    run = Run.load(run_folder(tmp_path, [metric(1, 1, 0.5), metric(1, 2, "nan"), metric(1, 3, "-inf")]))
    assert run.config_text == 'name = "run"\n'
    assert [step for step, _ in run.series("reward/mean")] == [1, 2, 3]
    values = [value for _, value in run.series("reward/mean")]
    assert values[0] == 0.5
    assert values[1] != values[1]
    assert values[2] == float("-inf")
    assert run.redone_steps() == []
    assert run.notes == []


def test_several_lines_of_one_step_add_up(tmp_path: Path) -> None:
    run = Run.load(run_folder(tmp_path, [metric(1, 1, 0.5), {"step": 1, "attempt": 1, "eval/a/accuracy": 0.25}]))
    assert run.metrics == [{"step": 1, "attempt": 1, "reward/mean": 0.5, "eval/a/accuracy": 0.25}]


def test_failure_02_the_last_attempt_of_a_step_counts_and_redone_work_is_named(tmp_path: Path) -> None:
    clock = [
        start(1, 1000),
        span(1, None, "setup", 0, 10, 1010),
        *(span(1, step, "update", 10 * step, 10 * step + 10, 1010 + 10 * step) for step in (1, 2, 3, 4)),
        beat(1, 5, "sample", 50, 54, 1054),  # killed in step 5
        start(2, 1100),
        span(2, None, "setup", 0, 10, 1110),
        *(span(2, step, "update", 10 * step - 20, 10 * step - 10, 1090 + 10 * step) for step in (3, 4, 5)),
    ]
    metrics = [metric(1, step, step) for step in (1, 2, 3, 4)] + [metric(2, step, 10 * step) for step in (3, 4, 5)]
    run = Run.load(run_folder(tmp_path, metrics, clock))
    assert run.series("reward/mean") == [(1, 1), (2, 2), (3, 30), (4, 40), (5, 50)]
    assert run.redone_steps() == [3, 4]
    assert run.redone_seconds() == 10 + 10 + 4
    assert run.seconds_by_phase() == {"setup": 20, "update": 70, "sample": 4}
    assert run.downtime_seconds() == 1100 - 1054


def test_steps_lost_with_an_attempt_are_not_shown_before_they_are_done_again(tmp_path: Path) -> None:
    metrics = [metric(1, step) for step in (1, 2, 3, 4)] + [metric(2, 2, 7)]
    run = Run.load(run_folder(tmp_path, metrics))
    assert run.series("reward/mean") == [(1, 0), (2, 7)]
    assert run.redone_steps() == [2, 3, 4]


def test_an_attempt_killed_in_its_first_step_supersedes_too(tmp_path: Path) -> None:
    clock = [start(1, 0), span(1, 1, "update", 0, 5, 5), span(1, 2, "update", 5, 9, 9), start(2, 20)]
    clock += [beat(2, 2, "sample", 0, 1, 21)]
    run = Run.load(run_folder(tmp_path, [metric(1, 1), metric(1, 2)], clock))
    assert run.redone_steps() == [2]
    assert run.redone_seconds() == 4


def test_three_attempts_from_the_same_checkpoint(tmp_path: Path) -> None:
    metrics = [metric(1, 1), metric(1, 2, 1), metric(2, 2, 2), metric(3, 2, 3)]
    run = Run.load(run_folder(tmp_path, metrics))
    assert run.series("reward/mean") == [(1, 0), (2, 3)]
    assert [record["attempt"] for record in run.superseded] == [1, 2]


def test_failure_02_torn_last_line_is_skipped_and_said(tmp_path: Path) -> None:
    run = Run.load(run_folder(tmp_path, [metric(1, 1)], tail='{"step":2,"attempt":1,"rewa'))
    assert [record["step"] for record in run.metrics] == [1]
    assert run.notes == ["metrics.jsonl: its last line is incomplete, skipped"]


def test_a_bad_line_in_the_middle_is_named(tmp_path: Path) -> None:
    run = Run.load(run_folder(tmp_path, [metric(1, 1)], tail="\x00\x00\n" + json.dumps(metric(1, 2)) + "\n"))
    assert [record["step"] for record in run.metrics] == [1, 2]
    assert run.notes == ["metrics.jsonl: line 3 is not JSON, skipped"]


def test_another_schema_is_refused(tmp_path: Path) -> None:
    run_folder(tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"schema_version":2}\n')
    with pytest.raises(RunError, match=r"metrics\.jsonl has schema_version 2, this stoker reads 1"):
        Run.load(tmp_path)


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="is not a run folder"):
        Run.load(tmp_path)


def test_failure_21_killed_for_memory_is_explained(tmp_path: Path) -> None:
    clock = [start(1, 0), beat(1, 40, "update", 0, 61, 61, peak_mb=7400, free_mb=120)]
    story = Run.load(run_folder(tmp_path, [], clock)).last_end()
    assert story is not None
    assert story.startswith("attempt 1 (pid 101 on box) ended without a word after 61 s, in phase update of step 40: ")
    assert "peaked at 7,400 MB, with 120 MB left" in story
    assert "probably killed it for memory (exit 137)" in story


def test_a_kill_with_memory_to_spare_is_not_blamed_on_memory(tmp_path: Path) -> None:
    clock = [start(1, 0), beat(1, 40, "update", 0, 61, 61, peak_mb=7400, free_mb=9000)]
    story = Run.load(run_folder(tmp_path, [], clock)).last_end()
    assert story is not None
    assert "137" not in story
    assert "killed, or the machine went down" in story


def test_a_closed_attempt_needs_no_explanation(tmp_path: Path) -> None:
    clock = [start(1, 0), span(1, 1, "update", 0, 5, 5), {"attempt": 1, "device": "cpu", "closed": 5.0}]
    run = Run.load(run_folder(tmp_path, [], clock))
    assert run.last_end() is None
    assert run.attempts[0].last_seen == 5.0
