"""`stoker batch`: what a user types and reads. The measuring itself is tested where it is."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from typer.testing import CliRunner

from stoker.batch.target import Maker
from stoker.cli import app
from stoker.cli_batch_frame import show
from tests.report import found

runner = CliRunner()

TRAIN = """
import ctypes
import os
import sys
import torch
from torch import nn
from stoker.batch import Target

def make_target(width="4"):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, int(width)), nn.{norm}, nn.Linear(int(width), 1))
    rows = torch.randn(64, 3)

    def loss(model, batch):
        return model(batch).square().mean()

    return Target(model, torch.optim.AdamW(model.parameters()), lambda size: rows[:size], loss, most=64)

def broken():
    raise KeyError("my own mistake")

def nothing():
    return 3

def loud():
    print("loading 3 of 3 shards")
    os.write(1, b"a library's own line\\n")
    return make_target()

def leaves():
    sys.exit(0)

def crashes():
    ctypes.string_at(0)
"""


@pytest.fixture
def train(tmp_path: Path) -> str:
    (tmp_path / "train.py").write_text(TRAIN.format(norm="Tanh()"))
    return f"{tmp_path}/train.py"


def test_help_teaches_and_gives_an_example_each() -> None:
    text = runner.invoke(app, ["batch", "--help"]).output
    for word in ("TARGET", "fit", "sweep", "memory", "prove", "scan", "make_target", "run.toml"):
        assert word in text
    for command in ("fit", "sweep", "memory", "prove", "scan"):
        assert f"Example: stoker batch {command} " in runner.invoke(app, ["batch", command, "--help"]).output
    assert "stoker batch fit" in runner.invoke(app, ["--help"]).output


def test_prove_prints_exits_and_draws(train: str, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    done = runner.invoke(
        app, ["batch", "prove", f"{train}:make_target", "--size", "6", "--splits", "3", "--html", str(page)]
    )
    assert done.exit_code == 0, done.output
    assert "every split gives the gradient of the whole batch" in done.output
    assert "2 ranks: 3 | 3" in done.output
    assert f"wrote {page}" in done.output
    assert "every split gives" in page.read_text()
    Path(train).write_text(TRAIN.format(norm="BatchNorm1d(4)"))
    faulty = runner.invoke(app, ["batch", "prove", f"{train}:make_target", "--size", "6", "--ranks", "1", "--json"])
    assert faulty.exit_code == 1
    made = json.loads(faulty.output)
    assert (made["equal"], made["causes"][0]["kind"], made["causes"][0]["place"]) == (False, "coupled examples", "1")


def test_memory_of_a_target_and_its_words(train: str, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    done = runner.invoke(
        app,
        ["batch", "memory", f"{train}:make_target", "8", "--size", "32", "--capacity-gib", "1", "--html", str(page)],
    )
    assert done.exit_code == 0, done.output
    for words in ("Sequential, adamw, 32 examples", "41 parameters", "in 1.00 GiB: up to", "optimizer states"):
        assert words in done.output, words
    for picture in found.pictures(page.read_text()):
        found.check(picture)
    made = json.loads(runner.invoke(app, ["batch", "memory", f"{train}:make_target", "--json"]).output)
    assert made["trace"]["parameters"] == 3 * 4 + 4 + 4 + 1


def test_memory_of_a_config_by_formula(tmp_path: Path) -> None:
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 128,
        "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2, "vocab_size": 1000,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    page = tmp_path / "page.html"
    words = [
        "batch",
        "memory",
        str(tmp_path),
        "--size",
        "4",
        "--tokens",
        "128",
        "--precision",
        "autocast",
        "--html",
        str(page),
    ]
    done = runner.invoke(app, words)
    assert done.exit_code == 0, done.output
    assert "4 examples" in done.output
    assert "checkpointing: saves" in done.output
    for picture in found.pictures(page.read_text()):
        found.check(picture)
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "novel"}))
    refused = runner.invoke(app, ["batch", "memory", str(tmp_path)])
    assert refused.exit_code == 2
    assert "stoker batch memory file.py:make_target" in refused.output
    assert runner.invoke(app, ["batch", "memory", str(tmp_path), "--precision", "fp7"]).exit_code == 2


def test_fit_hands_its_options_on_and_tells_of_each_trial(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    given: dict[str, Any] = {}
    answer = found.fit()

    def fit(maker: Maker, *, on_trial: Any, **options: Any) -> Any:
        given.update(options, maker=maker)
        if on_trial:
            on_trial(answer.trials[0], 4)
            on_trial(answer.trials[5], None)
        return answer

    monkeypatch.setattr("stoker.batch.fitting.fit", fit)
    page = tmp_path / "page.html"
    words = ["batch", "fit", "train.py:make_target", "a", "b", "--limit-gib", "2", "--ranks", "2", "--html", str(page)]
    done = runner.invoke(app, [*words, "--per-update", "2432"])
    assert done.exit_code == 0, done.output
    assert given["maker"] == Maker("train.py:make_target", ("a", "b"))
    assert (given["limit_bytes"], given["headroom"], given["ranks"]) == (2 * 2**30, 0.05, 2)
    assert "1: ran, peak 123.0 MiB, 4.2 s; about 4 more, 0:00:17" in done.output
    assert "643: out of memory, 4.2 s\n" in done.output
    assert "608 examples fit on cpu, certified" in done.output
    assert "2,432 per update = 4 micro-batches of up to 608" in done.output
    assert "608 examples fit, certified" in page.read_text()
    as_json = runner.invoke(app, [*words, "--json"])
    assert json.loads(as_json.stdout)["size"] == 608


def test_sweep_hands_its_options_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    given: dict[str, Any] = {}

    def sweep(maker: Maker, sizes: Any, *, on_part: Any, **options: Any) -> Any:
        given.update(options, maker=maker, sizes=sizes)
        if on_part:
            on_part("8: 250.00 ms/step, 32/s", 61.0)
        return found.sweep()

    monkeypatch.setattr("stoker.batch.sweeping.sweep", sweep)
    words = [
        "batch",
        "sweep",
        "pkg.mod:make",
        "--sizes",
        "8, 16",
        "--present",
        "8",
        "--no-remedies",
        "--scenario",
        "ctr",
    ]
    done = runner.invoke(app, [*words, "--html", str(tmp_path / "page.html")])
    assert done.exit_code == 0, done.output
    assert (given["sizes"], given["present"], given["remedies"], given["scenario"]) == ([8, 16], 8, False, "ctr")
    assert "0:00:00  8: 250.00 ms/step, 32/s; about 0:01:01 left\n" in done.stderr
    assert "Saturated from 270 examples." in done.output
    assert "Saturated from 270" in (tmp_path / "page.html").read_text()
    assert json.loads(runner.invoke(app, [*words, "--json"]).stdout)["recommended"] == 256


@pytest.mark.parametrize(
    ("command", "part"), [("prove", "causes looked for"), ("memory", "2 examples traced"), ("sweep", "2: ")]
)
def test_parts_of_long_work_are_told_on_stderr_and_not_to_machines(
    command: str, part: str, train: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"prove": ["--ranks", "1"], "memory": [], "sweep": ["--sizes", "2,4", "--no-remedies"]}[command]
    words = ["batch", command, f"{train}:make_target", *options]
    monkeypatch.setattr("stoker.cli_progress.SHORT_SECONDS", 0.0)
    long = runner.invoke(app, words)
    assert part in long.stderr and "; about 0:00:0" in long.stderr
    assert part + "; " not in long.stdout
    assert runner.invoke(app, [*words, "--json"]).stderr == ""


def test_what_takes_a_moment_passes_in_silence(train: str) -> None:
    assert runner.invoke(app, ["batch", "prove", f"{train}:make_target", "--ranks", "1"]).stderr == ""


@pytest.mark.parametrize(
    ("target", "says"),
    [
        ("train.py", "name it as train.py:make_target"),
        ("gone.toml", "run file gone.toml does not exist"),
        ("gone.py:make_target", "gone.py does not exist"),
        ("no_such_package.mod:make_target", "no module 'no_such_package'"),
    ],
)
def test_a_wrong_target_is_named_with_the_way_out(target: str, says: str) -> None:
    done = runner.invoke(app, ["batch", "prove", target])
    assert done.exit_code == 2
    assert says in done.output.replace("\n", " ")
    assert "Traceback" not in done.output


def test_wrong_names_and_numbers(train: str) -> None:
    near = runner.invoke(app, ["batch", "prove", f"{train}:make_targt"])
    assert near.exit_code == 2
    assert "did you mean 'make_target'?" in near.output
    other = runner.invoke(app, ["batch", "prove", f"{train}:nothing"])
    assert other.exit_code == 2
    assert "made a int without" in other.output
    splits = runner.invoke(app, ["batch", "prove", f"{train}:make_target", "--splits", "a,b"])
    assert splits.exit_code == 2
    assert "--splits = 'a,b': whole numbers" in splits.output
    as_json = runner.invoke(app, ["batch", "prove", f"{train}:nothing", "--json"])
    assert json.loads(as_json.stdout)["event"] == "error"


def test_a_mistake_of_the_users_own_keeps_its_traceback(train: str) -> None:
    """From their own first line on: stoker's frames, which load and call it, tell nobody anything."""
    done = runner.invoke(app, ["batch", "prove", f"{train}:broken", "--json"])
    assert done.exit_code == 1
    assert "Traceback" in done.stderr
    assert 'train.py", line' in done.stderr
    assert "KeyError: 'my own mistake'" in done.stderr
    assert "stoker/batch" not in done.stderr
    assert "my own mistake" in json.loads(done.stdout)["text"]
    Path(train).write_text("def make_target(:\n")
    done = runner.invoke(app, ["batch", "prove", f"{train}:make_target"])
    assert 'train.py", line 1\n    def make_target(:' in done.stderr
    assert "importlib" not in done.stderr


@pytest.mark.parametrize("command", ["memory", "prove"])
def test_what_a_training_prints_is_not_in_the_json(train: str, command: str) -> None:
    """Its `print` stood before the object on stdout, which no program could read then."""
    more = ["--size", "4", *(["--ranks", "1"] if command == "prove" else []), "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "stoker.cli", "batch", command, f"{train}:loud", *more],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    assert json.loads(done.stdout)
    assert "loading 3 of 3 shards" in done.stderr
    assert "a library's own line" in done.stderr


def test_a_training_that_ends_the_process_is_an_error(train: str) -> None:
    """Exit code 0 and not a word: a file that runs its training when it is loaded does that."""
    done = runner.invoke(app, ["batch", "memory", f"{train}:leaves", "--json"])
    assert done.exit_code == 1
    assert "ended the process (sys.exit(0)): what runs a training" in json.loads(done.stdout)["text"]


@pytest.mark.skipif(sys.platform != "linux", reason="what a crash is called is the system's affair")
def test_a_training_whose_c_code_crashes_is_told_by_its_own_line(train: str) -> None:
    """The process was gone, and not a word said where."""
    command = [sys.executable, "-m", "stoker.cli", "batch", "memory", f"{train}:crashes"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == -signal.SIGSEGV
    assert 'train.py", line' in done.stderr and "in crashes" in done.stderr


def test_a_page_that_can_not_be_written_is_said_before_anything_is_measured(train: str, tmp_path: Path) -> None:
    for page, words in ((tmp_path / "no" / "page.html", "there is no folder"), (tmp_path, "can't be written")):
        done = runner.invoke(app, ["batch", "memory", f"{train}:nothing", "--html", str(page)])
        assert done.exit_code == 2
        assert words in done.output


def test_options_of_a_model_are_not_ignored_for_a_function(train: str) -> None:
    for option in (["--tokens", "512"], ["--optimizer", "sgd"], ["--checkpointing"], ["--lora-rank", "8"]):
        done = runner.invoke(app, ["batch", "memory", f"{train}:make_target", *option])
        assert done.exit_code == 2
        assert f"{option[0]} is of a model's folder or config.json: a function's training has its own" in done.output


@pytest.mark.parametrize("gib", ["0", "-1", "nan", "inf", "1e30"])
def test_a_limit_is_a_size(train: str, gib: str) -> None:
    for command, option in (("fit", "--limit-gib"), ("memory", "--capacity-gib")):
        done = runner.invoke(app, ["batch", command, f"{train}:make_target", option, gib, "--json"])
        assert done.exit_code == 2
        assert "a size above 0, in GiB" in json.loads(done.stdout)["text"]


def test_numbers_that_json_does_not_have_are_null(capsys: pytest.CaptureFixture[str]) -> None:
    show("Fit", "t", {"a": [float("nan"), 1.5], "b": {"c": float("inf")}}, "", list, None, as_json=True)
    assert json.loads(capsys.readouterr().out) == {"a": [None, 1.5], "b": {"c": None}}


@pytest.mark.skipif(sys.platform != "linux", reason="trials end with their parent on Linux")
def test_a_fit_that_is_asked_to_end_takes_its_folder_and_trial_with_it(train: str, tmp_path: Path) -> None:
    """SIGTERM (a scheduler's, a container's) left both."""
    (tmp_path / "tmp").mkdir()
    command = [sys.executable, "-m", "stoker.cli", "batch", "fit", f"{train}:make_target"]
    fit = subprocess.Popen(command, env=os.environ | {"TMPDIR": str(tmp_path / "tmp")}, stderr=subprocess.DEVNULL)
    try:
        end = time.monotonic() + 60
        while not (children := psutil.Process(fit.pid).children()):
            assert time.monotonic() < end
            time.sleep(0.02)
        fit.terminate()
        assert fit.wait(60) == 128 + signal.SIGTERM
        assert psutil.wait_procs(children, 10)[1] == []
        assert [*(tmp_path / "tmp").glob("stoker-trial-*")] == []
    finally:
        fit.kill()
        fit.wait()
