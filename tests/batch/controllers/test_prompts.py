"""The batch numbers of steps that change; expected values by hand."""

import pytest

from stoker.batch import plan
from stoker.batch.controllers.by_noise import ByNoise
from stoker.batch.controllers.by_plateau import ByPlateau
from stoker.batch.controllers.prompts import growth_factor, schedule_of, stage_of, stages_of
from stoker.batch.noise import Mean, NoiseEstimate
from stoker.batch.stages import Progress
from stoker.config.load import from_dict
from stoker.config.schema import RunConfig


def run(*overrides: str, **schedule: object) -> RunConfig:
    base = ("sampling.prompts_per_step=16", "sampling.samples_per_prompt=4", "optimizer.learning_rate=1e-4")
    return from_dict(
        {"name": "a", "task": {"sources": [{"path": "x"}]}, "schedule": schedule}, [*base, "stop.steps=10", *overrides]
    )


def test_stages_by_step_and_by_samples() -> None:
    by_step = stages_of(run(kind="stages", prompts=[64, 32], starts=[2, 5]))
    assert [(s.after_steps, s.prompts_per_step, s.samples_per_step) for s in by_step] == [
        (0, 16, 64),
        (2, 64, 256),
        (5, 32, 128),
    ]
    assert [s.learning_rate for s in by_step] == pytest.approx([1e-4, 2e-4, 2**0.5 * 1e-4])  # the root, for AdamW
    by_samples = stages_of(run(kind="stages", by="samples", prompts=[64, 32], starts=[128, 512]))
    assert [s.after_steps for s in by_samples] == [0, 2, 4]  # 64, 128 | 384, 640 | ...


def test_a_ramp_in_multiples() -> None:
    made = stages_of(run(kind="ramp", last=32, over=4, multiple=8))
    assert [(s.after_steps, s.prompts_per_step) for s in made] == [(0, 16), (2, 24), (4, 32)]


@pytest.mark.parametrize(
    ("overrides", "rule", "factor"),
    [
        ((), "default", 2),
        (("optimizer.name=sgd",), "default", 4),
        (("optimizer.name=adafactor",), "default", 2),
        (("optimizer.name=sgd",), "sqrt", 2),
        ((), "linear", 4),
        ((), "keep", 1),
    ],
)
def test_the_rate_follows_by_the_optimizers_rule(overrides: tuple[str, ...], rule: str, factor: float) -> None:
    config = run(*overrides, kind="stages", prompts=[64], starts=[2], rule=rule)
    assert growth_factor(config, "policy", 4.0) == factor
    assert stage_of(config, 64).learning_rate == pytest.approx(factor * 1e-4)
    assert growth_factor(config, "policy", 1.0) == 1
    assert growth_factor(config, "critic", 4.0) == {"sqrt": 2, "linear": 4, "keep": 1, "default": 2}[rule]


def test_with_samples_per_update_steps_have_more_updates_at_the_same_rate() -> None:
    config = run("update.samples_per_update=32", "update.epochs_per_step=2", kind="stages", prompts=[64], starts=[2])
    stage = stage_of(config, 64)
    assert (stage.samples_per_update, stage.updates_per_step, stage.learning_rate) == (32, 16, 1e-4)


def test_the_plan_counts_over_the_stages() -> None:
    made = plan.make(run("optimizer.warmup_fraction=0.25", kind="stages", prompts=[64, 32], starts=[2, 5]))
    assert made.total_samples == 2 * 64 + 3 * 256 + 5 * 128 == 1536
    assert made.total_updates == 10
    assert (made.warmup_samples, made.warmup_updates) == (384, 3)  # 128 in two steps, then one of 256
    assert plan.from_json(made.to_json()) == made
    lines = [line.split() for line in str(made).splitlines()]
    assert [line[:6] for line in lines if line[0] == "from"] == [
        ["from", "step", "3", "64", "prompts", "global"],
        ["from", "step", "6", "32", "prompts", "global"],
    ]
    assert "schedule: 256 samples per step, 256 per update, 1 update, learning rate 0.0002 at its peak" in str(made)
    assert "over the stages" in str(made)


def test_a_long_ramp_is_cut_in_the_table() -> None:
    made = plan.make(run("stop.steps=40", kind="ramp", last=48, over=32))
    assert len(made.stages) == 33
    text = str(made)
    assert text.count("from step ") == 12 and "20  changes" in text and "from step 33" in text


def test_where_the_run_decides_the_plan_says_so() -> None:
    config = run("validation.holdout=8", "validation.every_samples=64", kind="plateau", last=64, patience=1)
    made = plan.make(config)
    assert len(made.stages) == 1 and not made.decided
    assert "undecided" in str(made) and made.total_samples == 640
    schedule = schedule_of(config)
    assert isinstance(schedule, ByPlateau)
    for step in (1, 2):
        schedule.observe(-0.5, Progress(0, step, 64 * step))
    assert [schedule(Progress(0, step, 0)) for step in (1, 2)] == [16, 32]


def test_by_noise_between_the_beginning_and_the_last_size() -> None:
    schedule = schedule_of(run(kind="noise", last=8, multiple=4, wait_steps=3))
    assert isinstance(schedule, ByNoise)
    noise = Mean(2.0, (1.0, 3.0))
    for step in (1, 2, 3, 4):
        schedule.observe(NoiseEstimate("prompts", 9, 9.0, 0, noise, noise, noise, ""), Progress(0, step, 64 * step))
    assert [schedule(Progress(0, step, 0)) for step in (0, 1, 9)] == [16, 8, 8]


def test_a_fixed_run_has_one_stage() -> None:
    (stage,) = stages_of(run())
    assert (stage.prompts_per_step, stage.updates_per_step, stage.learning_rate) == (16, 1, 1e-4)
    assert schedule_of(run())(Progress(0, 7, 1000)) == 16


@pytest.mark.parametrize(
    "schedule",
    [
        {},
        {"kind": "stages", "prompts": [64, 32], "starts": [2, 5]},
        {"kind": "ramp", "last": 32, "over": 500, "by": "samples"},
        {"kind": "plateau", "last": 32},
    ],
)
def test_a_run_without_an_end_has_the_stages_of_a_short_one(schedule: dict[str, object]) -> None:
    evaluates = ("validation.holdout=4", "validation.every_samples=64")
    short, endless = (run(f"stop.steps={steps}", *evaluates, **schedule) for steps in (20, 10**15))
    assert stages_of(endless) == stages_of(short)
