"""Other frameworks' batch numbers, translated; expected values by hand."""

import pytest

from stoker.batch import plan
from stoker.batch.translate import Translation, from_openrlhf, from_trl, from_verl
from stoker.config.load import from_dict
from stoker.errors import ConfigError


def numbers(made: Translation) -> tuple[int, int, int, int]:
    return made.prompts_per_step, made.samples_per_prompt, made.samples_per_update, made.epochs_per_step


def test_trl_counts_completions_per_device() -> None:
    # 8 completions x 4 devices x 2 accumulated = 64 completions = 8 prompts of 8, one update
    made = from_trl(per_device_train_batch_size=8, num_generations=8, gradient_accumulation_steps=2, world_size=4)
    assert numbers(made) == (8, 8, 64, 1)
    assert made.microbatch_samples == 8
    assert "samples_per_update = 8 per device x 4 devices x 2 accumulated = 64" in made.arithmetic


def test_trl_generation_for_several_updates() -> None:
    # 4 x 2 x 8 = 64 completions a generation, 4 x 2 x 2 = 16 an update, used 3 times over
    made = from_trl(
        per_device_train_batch_size=4,
        num_generations=4,
        gradient_accumulation_steps=2,
        world_size=2,
        steps_per_generation=8,
        num_iterations=3,
    )
    assert numbers(made) == (16, 4, 16, 3)
    same = from_trl(
        per_device_train_batch_size=4,
        num_generations=4,
        gradient_accumulation_steps=2,
        world_size=2,
        generation_batch_size=64,
        num_iterations=3,
    )
    assert same == made


def test_trl_several_generations_in_one_update_are_one_step() -> None:
    # 8 completions a generation, 32 an update: the policy stands still for 4 generations
    made = from_trl(
        per_device_train_batch_size=8, num_generations=8, gradient_accumulation_steps=4, steps_per_generation=1
    )
    assert numbers(made) == (4, 8, 32, 1)
    assert "4 generations without an update between them" in made.arithmetic[0]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"num_generations": 5}, "generation_batch_size = 16 is not a multiple of num_generations = 5"),
        ({"generation_batch_size": 12}, "generation_batch_size = 12 is not a multiple of per_device"),
        ({"generation_batch_size": 16, "steps_per_generation": 2}, "not both"),
        ({"steps_per_generation": 3}, "24 completions per generation against 16 per optimizer step"),
        ({"steps_per_generation": 1, "num_iterations": 2}, "no equal in whole steps"),
    ],
)
def test_trl_numbers_that_do_not_fit(change: dict[str, int], expected: str) -> None:
    base = {"per_device_train_batch_size": 8, "num_generations": 8, "gradient_accumulation_steps": 2}
    with pytest.raises(ConfigError, match=expected):
        from_trl(**base | change)


def test_verl_counts_prompts_over_all_devices() -> None:
    # 1,024 prompts x 5; mini-batch 256 prompts = 1,280 samples; 4 updates a step
    made = from_verl(train_batch_size=1024, ppo_mini_batch_size=256, n=5, ppo_micro_batch_size_per_gpu=16)
    assert numbers(made) == (1024, 5, 1280, 1)
    assert made.microbatch_samples == 16
    with pytest.raises(ConfigError, match=r"1000 is not a multiple of actor.ppo_mini_batch_size = 256"):
        from_verl(train_batch_size=1000, ppo_mini_batch_size=256, n=5)


def test_openrlhf_counts_prompts_for_the_rollout_and_samples_for_the_update() -> None:
    # 128 prompts x 8 = 1,024 samples; updates of 128 samples: 8 a step
    made = from_openrlhf(rollout_batch_size=128, n_samples_per_prompt=8, train_batch_size=128, micro_train_batch_size=4)
    assert numbers(made) == (128, 8, 128, 1)
    assert made.microbatch_samples == 4
    with pytest.raises(ConfigError, match=r"1024 is not a multiple of train.batch_size = 96"):
        from_openrlhf(rollout_batch_size=128, n_samples_per_prompt=8, train_batch_size=96)


def test_overrides_give_a_run_file_with_the_same_plan() -> None:
    made = from_verl(train_batch_size=64, ppo_mini_batch_size=16, n=8, ppo_epochs=2)
    config = from_dict({"name": "a", "task": {"sources": [{"path": "x"}]}}, made.overrides())
    planned = plan.make(config)
    assert (planned.samples_per_step, planned.samples_per_update, planned.updates_per_step) == (512, 128, 8)


def test_printed_it_shows_the_arithmetic_and_the_overrides() -> None:
    lines = str(from_trl(per_device_train_batch_size=8, num_generations=8, gradient_accumulation_steps=4)).splitlines()
    assert lines[0] == "samples per step = 8 per device x 1 devices x 4 steps per generation = 32"
    assert lines[-1] == (
        "overrides: sampling.prompts_per_step=4 sampling.samples_per_prompt=8 update.samples_per_update=32 "
        "update.epochs_per_step=1"
    )
