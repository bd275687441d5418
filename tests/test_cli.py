"""What a user types and reads."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from stoker.cli import app
from stoker.config import load as config_load

runner = CliRunner()

RUN_FILE = """
name = "run"
runs_dir = "{folder}/runs"
[model]
path = "embedded:tiny"
from_scratch = true
[task]
sources = [{{ path = "stoker.embedded.addition:problems", kwargs = {{ digits = 1, count = 60 }} }}]
[validation]
holdout = 8
[[rewards]]
function = "exact"
[sampling]
prompts_per_step = 4
samples_per_prompt = 4
max_new_tokens = 4
[kl]
coefficient = 0.0
[stop]
steps = 2
"""


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(RUN_FILE.format(folder=tmp_path))
    return path


def test_help_teaches_the_order_of_things() -> None:
    text = runner.invoke(app, ["--help"]).output
    for word in ("init", "train", "eval", "try", "--dry-run", "--smoke"):
        assert word in text


def test_init_writes_a_run_file_that_loads_and_does_not_overwrite_it(tmp_path: Path) -> None:
    path = tmp_path / "first.toml"
    assert runner.invoke(app, ["init", str(path), "--yes"]).exit_code == 0
    assert config_load.load(path).name == "first"
    again = runner.invoke(app, ["init", str(path), "--yes"])
    assert again.exit_code == 2
    assert "--force" in again.output


def test_init_asks_for_what_no_option_gives(tmp_path: Path) -> None:
    path = tmp_path / "asked.toml"
    done = runner.invoke(app, ["init", str(path), "--model", "some/model"], input="data.jsonl\nexact\nppo\n")
    assert done.exit_code == 0, done.output
    config = config_load.load(path)
    assert (config.model.path, config.task.sources[0].path) == ("some/model", "data.jsonl")
    assert (config.rewards[0].function, config.algorithm.name) == ("exact", "ppo")


def test_init_asks_again_for_an_algorithm_that_is_not_known(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    done = runner.invoke(app, ["init", str(path)], input="\n\n\nrlo\nrloo\n")
    assert done.exit_code == 0, done.output
    assert "algorithm 'rlo' is not known; did you mean 'rloo'?" in done.output
    assert config_load.load(path).algorithm.name == "rloo"
    refused = runner.invoke(app, ["init", str(tmp_path / "other.toml"), "--yes", "--algorithm", "rlo"])
    assert refused.exit_code == 2 and "did you mean 'rloo'?" in refused.output


@pytest.mark.parametrize(("model", "reward"), [("embedded:tiny", "exact"), ("some/model", "math")])
def test_init_proposes_a_reward_that_reads_the_models_answers(tmp_path: Path, model: str, reward: str) -> None:
    assert runner.invoke(app, ["init", str(tmp_path / "run.toml"), "--yes", "--model", model]).exit_code == 0
    assert config_load.load(tmp_path / "run.toml").rewards[0].function == reward


@pytest.mark.parametrize(
    ("name", "text", "holdout"),
    [
        ("few.csv", "prompt,answer\n" + '"1+\n1=",2\n' * 60, 12),  # rows of two lines each
        ("few.jsonl", '{"prompt": "1+1=", "answer": "2"}\n' * 60 + "no row\n" * 60, 12),
        ("many.jsonl", '{"prompt": "1+1=", "answer": "2"}\n' * 900, 128),
        ("broken.parquet", "none", 128),
        ("unknown.txt", "none", 128),
    ],
)
def test_init_holds_out_a_fifth_of_a_small_file(tmp_path: Path, name: str, text: str, holdout: int) -> None:
    (tmp_path / name).write_text(text)
    done = runner.invoke(app, ["init", str(tmp_path / "run.toml"), "--yes", "--data", str(tmp_path / name)])
    assert done.exit_code == 0, done.output
    assert config_load.load(tmp_path / "run.toml").validation.holdout == holdout


def test_dry_run_prints_config_plan_and_warnings_and_runs_nothing(run_file: Path, tmp_path: Path) -> None:
    done = runner.invoke(app, ["train", str(run_file), "--dry-run", "sampling.temperature=0.5"])
    assert done.exit_code == 0
    assert "temperature = 0.5" in done.output
    assert "4 x 4" in done.output
    assert "KL to the reference: none (kl.coefficient = 0)" in done.output
    assert "warning: sampling.prompts_per_step = 4" in done.output
    assert not (tmp_path / "runs").exists()


def test_dry_run_leaves_an_automatic_micro_batch_to_the_start(run_file: Path) -> None:
    automatic = ["train", str(run_file), "--dry-run", "update.tokens_per_microbatch=auto"]
    done = runner.invoke(app, automatic)
    assert done.exit_code == 0, done.output
    assert "update.tokens_per_microbatch = 'auto': decided at the start by the fit" in done.output
    plan = json.loads(runner.invoke(app, [*automatic, "--json"]).output)["batch_plan"]
    assert plan["tokens_per_microbatch"] is None


def test_dry_run_as_json(run_file: Path) -> None:
    done = runner.invoke(app, ["train", str(run_file), "--dry-run", "rewards.0.function=gone.py:fn"])
    assert "warning: rewards.0.function = 'gone.py:fn': there is no gone.py" in done.output
    assert runner.invoke(app, ["--version"]).output.startswith("stoker ")
    done = runner.invoke(app, ["train", str(run_file), "--dry-run", "--json"])
    plan = json.loads(done.output)["batch_plan"]
    assert plan["samples_per_step"] == 16


def test_an_unknown_key_is_named_with_the_nearest_one(run_file: Path) -> None:
    done = runner.invoke(app, ["train", str(run_file), "--dry-run", "sampling.temprature=1"])
    assert done.exit_code == 2
    assert "sampling.temprature" in done.output
    assert "temperature" in done.output
    assert "Traceback" not in done.output


def test_smoke_runs_one_step_and_audits_the_reward(run_file: Path, tmp_path: Path) -> None:
    done = runner.invoke(app, ["train", str(run_file), "--smoke", "--json"])
    assert done.exit_code == 0, done.output
    (report,) = [json.loads(line) for line in done.output.splitlines()]
    assert report["ok"]
    assert report["notes"][0].startswith("problems: 60 rows, prompt from `prompt`")
    assert {"setup", "sample", "reward", "update", "checkpoint"} <= report["seconds"].keys()
    assert {line["kind"] for line in report["audit"]} == {"right", "wrong", "unparsable", "gamed"}
    assert not (tmp_path / "runs").exists()


def test_smoke_fails_where_the_reward_ranks_a_gamed_answer_with_the_right_one(run_file: Path, tmp_path: Path) -> None:
    reward = tmp_path / "lenient.py"
    reward.write_text(
        "def anywhere(completions, answer, **columns):\n"
        "    return [float(a in c) for c, a in zip(completions, answer)]\n"
    )
    done = runner.invoke(app, ["train", str(run_file), "--smoke", f'rewards.0.function="{reward}:anywhere"'])
    assert done.exit_code == 1
    assert "NOT OK  gamed" in done.output


def test_smoke_warns_of_the_run_files_sizes_not_of_its_own(run_file: Path) -> None:
    done = runner.invoke(app, ["train", str(run_file), "--smoke", "sampling.prompts_per_step=24"])
    assert done.exit_code == 0, done.output
    assert "prompts_per_step" not in done.output
    assert "-smoke" not in done.output  # no folder that is gone
    done = runner.invoke(app, ["train", str(run_file), "--smoke", "rewards.0.function=math"])
    assert "warning: in this step, no answer was found in 100% of the samples" in done.output


def test_eval_of_what_is_no_run_folder_needs_a_run_file(tmp_path: Path) -> None:
    for words in ([], ["sampling.temperature=0.5"]):
        done = runner.invoke(app, ["eval", str(tmp_path), *words])
        assert done.exit_code == 2
        assert "RUN_FILE" in done.output


def test_a_failed_smoke_names_no_folder_that_is_gone(run_file: Path) -> None:
    done = runner.invoke(app, ["train", str(run_file), "--smoke", "task.max_prompt_tokens=1"])
    assert done.exit_code == 1
    assert "max_prompt_tokens" in done.output
    assert "run folder" not in done.output and "--resume" not in done.output


def test_try_of_a_folder_that_is_not_there_names_the_nearest(tmp_path: Path) -> None:
    (tmp_path / "first").mkdir()
    done = runner.invoke(app, ["try", str(tmp_path / "frist")])
    assert done.exit_code == 1
    assert "there is no folder" in done.output and "did you mean 'first'" in done.output


def test_train_eval_and_try_end_to_end(run_file: Path, tmp_path: Path) -> None:
    done = runner.invoke(app, ["train", str(run_file)])
    assert done.exit_code == 0, done.output
    assert "held-out answers (holdout): right" in done.output
    run = str(tmp_path / "runs" / "run")
    measured = runner.invoke(app, ["eval", run, str(run_file), "--json"])
    assert json.loads(measured.output)["holdout"]["prompts"] == 8
    sampled = runner.invoke(app, ["eval", run, "validation.samples_per_prompt=1", "--samples", "4", "--json"])
    assert "pass@4" in json.loads(sampled.output)["holdout"]
    answers = runner.invoke(app, ["try", run, "--prompt", "1+2=", "--samples", "2"])
    assert answers.exit_code == 0, answers.output
    odd = runner.invoke(app, ["try", run, "--prompt", "1+\udcff="])  # how the shell hands over bytes that are not UTF-8
    assert odd.exit_code == 0, odd.output
    talk = runner.invoke(app, ["try", run], input="1+2=\n\n")
    assert talk.exit_code == 0


def test_a_failed_run_says_where_it_is_and_how_to_go_on(run_file: Path, tmp_path: Path) -> None:
    reward = tmp_path / "broken.py"
    reward.write_text("def broken(completions, **columns):\n    raise ValueError('no such key')\n")
    done = runner.invoke(app, ["train", str(run_file), f'rewards.0.function="{reward}:broken"'])
    assert done.exit_code == 1
    for part in ("no such key", "run folder:", "last good step", "--resume"):
        assert part in done.output or part == "last good step"


def test_json_mode_prints_nothing_but_json(run_file: Path) -> None:
    done = runner.invoke(app, ["train", str(run_file), "--json"])
    lines = [json.loads(line) for line in done.output.splitlines()]
    assert [line["step"] for line in lines if "reward/mean" in line] == [1, 2]


def test_init_where_nothing_can_be_written_says_so(tmp_path: Path) -> None:
    done = runner.invoke(app, ["init", str(tmp_path / "no" / "run.toml"), "--yes"])
    assert done.exit_code == 2
    assert "can't be written" in done.output
    assert "Traceback" not in done.output


def test_profile_prints_a_table_and_in_json_one_object(run_file: Path, tmp_path: Path) -> None:
    done = runner.invoke(app, ["train", str(run_file), "--profile", "1", "--quiet"])
    assert done.exit_code == 0, done.output
    for part in ("matmul peak measured here", "tokens/s", "MFU", "longest operators", "ui.perfetto.dev"):
        assert part in done.output
    as_json = runner.invoke(app, ["train", str(run_file), "--profile", "1", "--json", "name=other"])
    lines = [json.loads(line) for line in as_json.output.splitlines()]
    assert lines[-1]["event"] == "profile"
    assert lines[-1]["phases"]["sample"]["tokens"] > 0
    for words in (["--profile", "2"], ["--profile", "1", "--smoke"]):
        refused = runner.invoke(app, ["train", str(run_file), *words, "name=third"])
        assert refused.exit_code == 2
        assert "Traceback" not in refused.output
