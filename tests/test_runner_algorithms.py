"""Every algorithm through the whole loop, and what dynamic sampling leaves in the books."""

from collections.abc import Callable
from pathlib import Path

import pytest

from stoker.config.algorithm import RECIPES
from stoker.config.schema import RunConfig
from stoker.engine.local import assembly
from stoker.errors import ConfigError
from stoker.record.metrics import undescribed
from stoker.record.read import Run, read_samples
from stoker.rl import advantages, losses
from tests.runs import comparable, final_weights, quiet, same, short_run

OWN = '''
"""What a user may bring."""

def even_digits(completions, **columns):
    """1 for an answer that begins with an even digit: a fifth or so of a random model's."""
    return [float(text[:1] in ("0", "2", "4", "6", "8")) for text in completions]

def constant(completions, **columns):
    return [0.5] * len(completions)

def halves(rewards):
    return rewards - 0.5

def plain(terms, log_ratio, objective):
    return -terms.advantages * log_ratio.exp()
'''
DYNAMIC = ("algorithm.dynamic_sampling_draws=3", "sampling.samples_per_prompt=2", "validation.every_samples=0")


@pytest.fixture
def make_config(tmp_path: Path) -> Callable[..., RunConfig]:
    """A run of two small steps on the embedded model."""
    (tmp_path / "own.py").write_text(OWN)

    def make(*overrides: str) -> RunConfig:
        sampling = {"prompts_per_step": 8, "samples_per_prompt": 4, "max_new_tokens": 5}
        rewards = [{"function": f"{tmp_path / 'own.py'}:even_digits"}]
        return short_run(tmp_path, *overrides, sampling=sampling, rewards=rewards)

    return make


@pytest.mark.parametrize("name", RECIPES)
def test_every_algorithm_runs_in_several_updates_a_step(make_config: Callable[..., RunConfig], name: str) -> None:
    config = make_config(f"algorithm.name={name}", "update.samples_per_update=16", "kl.coefficient=0.05")
    first, second = Run.load(quiet(config).folder).metrics[1:]
    assert undescribed(first) == []
    assert first["optim/grad_norm"] > 0 and second["kl/sequence"] != 0.0
    assert first["policy/mismatch_max"] < 1e-4
    assert first["batch/samples"] <= 32


def test_remax_draws_a_greedy_answer_of_each_prompt_and_does_not_train_on_it(
    make_config: Callable[..., RunConfig],
) -> None:
    config = make_config("algorithm.name=remax", "sampling.samples_per_prompt=1", "kl.coefficient=0")
    result = quiet(config)
    record = Run.load(result.folder).metrics[1]
    assert (record["sample/count"], record["batch/samples"], record["batch/prompts"]) == (16, 8, 8)
    lines = read_samples(result.folder / "samples" / "step_1.jsonl.gz")
    greedy = {line["prompt"]: line for line in lines if line.get("greedy")}
    assert len(greedy) == 8
    for line in lines:
        if not line.get("greedy"):
            assert line["advantage"] == line["reward"] - greedy[line["prompt"]]["reward"]
    assert sum(line["tokens"] for line in lines) == record["sample/tokens"]


# --- dynamic sampling ---------------------------------------------------------------------------------


def test_dynamic_sampling_keeps_what_was_paid_for_in_the_books(make_config: Callable[..., RunConfig]) -> None:
    result = quiet(make_config(*DYNAMIC))
    record = Run.load(result.folder).metrics[1]
    assert record["sample/draws"] > 1 and record["sample/discarded"] > 0
    assert record["sample/prompts"] == record["batch/prompts"] + record["sample/discarded"] / 2
    assert record["sample/count"] == record["batch/samples"] + record["sample/discarded"]
    assert record["batch/prompts"] + record["batch/missing_prompts"] == 8
    lines = read_samples(result.folder / "samples" / "step_1.jsonl.gz")
    assert len({line["id"] for line in lines}) == len(lines) == record["sample/count"]
    assert sum(line.get("discarded", False) for line in lines) == record["sample/discarded"]
    assert all(line["advantage"] != 0 for line in lines if not line.get("discarded"))


def test_a_resume_with_dynamic_sampling_is_the_run_never_stopped(make_config: Callable[..., RunConfig]) -> None:
    """52 training rows, up to 24 prompts a step: so the run crosses an epoch's end."""
    whole = quiet(make_config("name=whole", "stop.steps=4", *DYNAMIC))
    for cut in (1, 3):
        quiet(make_config(f"name=cut{cut}", f"stop.steps={cut}", *DYNAMIC))
        resumed = quiet(make_config(f"name=cut{cut}", "stop.steps=4", *DYNAMIC), resume=True)
        found, expected = comparable(resumed.folder), comparable(whole.folder)
        del found[cut], expected[cut]  # the first part evaluated at its end
        assert found == expected
        assert same(final_weights(resumed), final_weights(whole))
    draws = [value for _, value in Run.load(whole.folder).series("sample/draws")]
    assert max(draws) > 1


def test_a_step_without_any_spread_trains_on_nothing_and_goes_on(
    make_config: Callable[..., RunConfig], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    constant = f'rewards.0.function="{tmp_path / "own.py"}:constant"'
    config = make_config("algorithm.dynamic_sampling_draws=9", "kl.coefficient=0.05", constant)
    result = quiet(config)
    assert (result.step, [one.samples_seen for one in result.evaluations]) == (2, [0, 32, 64])
    record = Run.load(result.folder).metrics[1]
    assert (record["batch/missing_prompts"], record["batch/samples"], record["optim/updates"]) == (8, 0, 0)
    assert record["sample/prompts"] == 52  # every row once: there are no others
    assert "dynamic sampling found 0 of 8 prompts whose answers differ in reward" in capsys.readouterr().out


# --- a user's own -------------------------------------------------------------------------------------


def test_a_users_own_advantage_and_loss(make_config: Callable[..., RunConfig], tmp_path: Path) -> None:
    own = tmp_path / "own.py"
    config = make_config(
        f'algorithm.advantage="{own}:halves"', f'algorithm.loss="{own}:plain"', "algorithm.advantage_scale=none"
    )
    result = quiet(config)
    lines = read_samples(result.folder / "samples" / "step_1.jsonl.gz")
    assert {line["advantage"] for line in lines} == {0.5, -0.5}
    assert Run.load(result.folder).metrics[1]["optim/grad_norm"] > 0


@pytest.mark.parametrize("key", ["advantage", "loss"])
def test_a_file_that_changed_between_two_runs_is_read_again(
    make_config: Callable[..., RunConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    monkeypatch.setattr(assembly, "load_model", lambda *_: pytest.fail("the model was loaded"))
    path = f"{tmp_path / 'own.py'}:halves"
    advantages.estimator(path), losses.surrogate(path)
    (tmp_path / "own.py").write_text("")
    with pytest.raises(ConfigError, match=rf"algorithm.{key} .* has no 'halves'"):
        quiet(make_config(f'algorithm.{key}="{path}"'))


@pytest.mark.parametrize("key", ["advantage", "loss"])
def test_a_path_that_leads_nowhere_is_found_before_the_model_loads(
    make_config: Callable[..., RunConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    monkeypatch.setattr(assembly, "load_model", lambda *_: pytest.fail("the model was loaded"))
    with pytest.raises(ConfigError, match=rf"algorithm.{key} .* has no 'plane'"):
        quiet(make_config(f'algorithm.{key}="{tmp_path / "own.py"}:plane"'))
