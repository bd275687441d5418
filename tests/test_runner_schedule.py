"""Runs whose prompts per step change: batch, learning rate, data order, and a resume that is the run never stopped."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stoker.config.schema import RunConfig
from stoker.errors import ConfigError, DataError
from stoker.record.read import Run, read_samples
from tests.runs import ENDS_LOW, comparable, final_weights, quiet, same, short_run

STAGES = {"kind": "stages", "prompts": [16, 8], "starts": [2, 4]}
RAMP = {"kind": "ramp", "last": 12, "over": 64, "by": "samples", "multiple": 2}
PLATEAU = {"kind": "plateau", "last": 16, "patience": 1, "threshold": 0.99}
"""No reward is that much higher, so every second evaluation changes the batch."""

NOISE = {"kind": "noise", "last": 16, "times": 10.0, "wait_steps": 1}
MEASURED = ("record.noise_every_steps=1", "sampling.prompts_per_step=8", "sampling.samples_per_prompt=8")


@pytest.fixture
def make_config(tmp_path: Path) -> Callable[..., RunConfig]:
    (tmp_path / "rewards.py").write_text(ENDS_LOW)

    def make(*overrides: str, **tables: Any) -> RunConfig:
        base = {"rewards": [{"function": f"{tmp_path / 'rewards.py'}:ends_low"}], "kl": {"coefficient": 0.0}}
        more = ("validation.every_samples=1", "validation.early_stop_after=0")  # so that each step evaluates
        return short_run(tmp_path, *more, *overrides, **(base | tables))

    return make


def column(folder: Path, name: str) -> list[float]:
    return [value for _, value in Run.load(folder).series(name)]


def test_batch_and_rate_follow_the_stages(make_config: Callable[..., RunConfig]) -> None:
    result = quiet(make_config("stop.steps=5", schedule=STAGES))
    assert column(result.folder, "batch/prompts_per_step") == [4, 4, 16, 16, 8]
    assert column(result.folder, "batch/samples_seen") == [16, 32, 96, 160, 192]
    root = 2**0.5
    assert column(result.folder, "optim/learning_rate") == pytest.approx([1e-3, 1e-3, 2e-3, 2e-3, root * 1e-3])
    drawn = [
        {one["id"].rpartition("/")[0] for one in read_samples(result.folder / "samples" / f"step_{step}.jsonl.gz")}
        for step in range(1, 6)
    ]
    assert [len(names) for names in drawn] == [4, 4, 16, 16, 8]
    everyone = [name for names in drawn for name in names]
    assert len(set(everyone)) == 48, "52 rows: no prompt comes twice in the first pass"


@pytest.mark.parametrize(
    ("schedule", "cuts"), [(STAGES, (2, 3)), (RAMP, (2,)), (PLATEAU, (2, 3))], ids=["stages", "ramp", "plateau"]
)
def test_resume_over_a_switch_is_the_run_never_stopped_bit_for_bit(
    make_config: Callable[..., RunConfig], schedule: dict[str, Any], cuts: tuple[int, ...]
) -> None:
    whole = quiet(make_config("name=whole", "stop.steps=5", schedule=schedule))
    assert len(set(column(whole.folder, "batch/prompts_per_step"))) > 1
    for cut in cuts:
        quiet(make_config(f"name=cut{cut}", f"stop.steps={cut}", schedule=schedule))
        parts = quiet(make_config(f"name=cut{cut}", "stop.steps=5", schedule=schedule), resume=True)
        assert comparable(parts.folder) == comparable(whole.folder)
        assert same(final_weights(parts), final_weights(whole))


def test_by_noise_the_run_decides_and_resumes_bit_for_bit(make_config: Callable[..., RunConfig]) -> None:
    whole = quiet(make_config("name=whole", "stop.steps=14", *MEASURED, schedule=NOISE))
    sizes = column(whole.folder, "batch/prompts_per_step")
    switches = [event for event in Run.load(whole.folder).events if event["kind"] == "batch_switch"]
    assert switches and sizes[0] == 8 and len(set(sizes)) > 1
    assert "prompts x 10" in switches[0]["message"]
    before = switches[0]["step"]
    for cut in (before - 1, before, before + 1):
        quiet(make_config(f"name=cut{cut}", f"stop.steps={cut}", *MEASURED, schedule=NOISE))
        parts = quiet(make_config(f"name=cut{cut}", "stop.steps=14", *MEASURED, schedule=NOISE), resume=True)
        assert comparable(parts.folder) == comparable(whole.folder)
        assert same(final_weights(parts), final_weights(whole))


def test_a_plateau_of_the_held_out_reward_is_told(make_config: Callable[..., RunConfig]) -> None:
    result = quiet(make_config("stop.steps=4", schedule=PLATEAU))
    assert column(result.folder, "batch/prompts_per_step") == [4, 8, 8, 16]
    switches = [event for event in Run.load(result.folder).events if event["kind"] == "batch_switch"]
    assert [(one["before"], one["now"]) for one in switches] == [(4, 8), (8, 16)]


def test_updates_of_fixed_samples_become_more(make_config: Callable[..., RunConfig]) -> None:
    result = quiet(make_config("stop.steps=3", "update.samples_per_update=16", schedule=STAGES))
    assert column(result.folder, "optim/updates") == [1, 1, 4]
    assert column(result.folder, "optim/learning_rate") == pytest.approx([1e-3] * 3)


def test_another_schedule_is_another_run(make_config: Callable[..., RunConfig]) -> None:
    quiet(make_config())
    with pytest.raises(ConfigError, match=r"schedule.kind: 'fixed' -> 'stages' \(alters the run\)"):
        quiet(make_config("stop.steps=3", schedule=STAGES), resume=True)


def test_too_few_rows_for_the_largest_step(make_config: Callable[..., RunConfig]) -> None:
    with pytest.raises(DataError, match="52 training rows"):
        quiet(make_config(schedule={"kind": "stages", "prompts": [64], "starts": [1]}))
