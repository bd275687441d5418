"""`stoker init`'s run file loads as it is, whatever is answered."""

from pathlib import Path

import pytest

from stoker.batch import plan
from stoker.config.init import Answers, name_of, template
from stoker.config.load import load
from stoker.config.schema import RunConfig


def loaded(folder: Path, answers: Answers) -> RunConfig:
    (folder / "run.toml").write_text(template(answers))
    return load(folder / "run.toml")


def test_the_default_is_the_embedded_task_from_scratch(tmp_path: Path) -> None:
    config = loaded(tmp_path, Answers())
    assert (config.model.path, config.model.from_scratch) == ("embedded:tiny", True)
    assert config.warm_start.updates > 0
    (source,) = config.task.sources
    assert source.path == "stoker.embedded.addition:problems"
    assert set(source.kwargs) == {"digits", "count", "seed"}
    assert config.rewards[0].function == "exact"  # its answers are bare numbers


def test_lengths_fit_the_embedded_model_whatever_the_data(tmp_path: Path) -> None:
    config = loaded(tmp_path, Answers(data="mine.jsonl"))
    assert config.task.max_prompt_tokens + config.sampling.max_new_tokens <= 64  # max_position_embeddings


def test_a_small_data_set_keeps_most_of_its_rows_for_training(tmp_path: Path) -> None:
    assert loaded(tmp_path, Answers(data="few.jsonl", rows=60)).validation.holdout == 12
    assert loaded(tmp_path, Answers(data="many.jsonl", rows=60_000)).validation.holdout == 128


@pytest.mark.parametrize("model", ["embedded:tiny", "models/smollm2"])
@pytest.mark.parametrize("data", ["stoker.embedded.addition:problems", "data/train.jsonl"])
@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_every_combination_loads_and_plans_without_warnings(
    tmp_path: Path, model: str, data: str, algorithm: str
) -> None:
    answers = Answers(name="mine", model=model, data=data, reward="judge.py:score", algorithm=algorithm, steps=7)  # type: ignore[arg-type]
    config = loaded(tmp_path, answers)
    assert (config.name, config.model.path, config.stop.steps) == ("mine", model, 7)
    assert config.algorithm.name == algorithm
    assert config.rewards[0].function == "judge.py:score"
    assert config.model.from_scratch == (model == "embedded:tiny")
    size = 900_000 if model == "embedded:tiny" else 7_000_000_000
    assert plan.make(config, size).warnings == ()


def test_sizes_of_a_step_are_taken_over(tmp_path: Path) -> None:
    config = loaded(tmp_path, Answers(prompts_per_step=48, samples_per_prompt=4))
    assert (config.sampling.prompts_per_step, config.sampling.samples_per_prompt) == (48, 4)
    assert config.validation.every_samples == 10 * 48 * 4


def test_odd_text_is_quoted(tmp_path: Path) -> None:
    path = 'C:\\data\\"new" \x7f\n.jsonl'
    assert loaded(tmp_path, Answers(data=path)).task.sources[0].path == path


def test_every_setting_has_a_comment_or_a_speaking_name() -> None:
    lines = template(Answers()).splitlines()
    bare = [line for line in lines if " = " in line and "#" not in line]
    assert {line.split(" = ")[0] for line in bare} <= {
        "seed",
        "sources",
        "examples_per_update",
        "learning_rate",
        "steps",
    }


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("run.toml", "run"),
        ("my run.toml", "my-run"),
        ("v1.2.toml", "v1.2"),
        ("a..b.toml", "a-b"),
        (".toml", "first-run"),
        ("é.toml", "first-run"),
    ],
)
def test_a_run_is_called_after_its_file(tmp_path: Path, file: str, name: str) -> None:
    assert name_of(file) == name
    assert loaded(tmp_path, Answers(name=name)).name == name
