"""`stoker batch scan`: what a user types and reads. The deciding itself is tested where it is."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from stoker.batch.scanning import sizes
from stoker.batch.target import Maker
from stoker.batch.trainings.setting import Setting
from stoker.batch.trainings.training import Plan
from stoker.cli import app
from tests.report import found

runner = CliRunner()
TARGET = "tests/batch/trainings_targets.py:regression"


def test_scan_hands_its_options_on_prints_and_draws(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    page, told = tmp_path / "page.html", {}

    def scan(make: Maker, over: list[int], plan: Plan, present: Setting, **more: Any) -> Any:
        told.update(make=make, sizes=over, plan=plan, present=present, **more)
        return found.scan()

    monkeypatch.setattr(sizes, "scan", scan)
    words = ["batch", "scan", "a.py:make_target", "wide", "--samples", "4096", "--base", "16", "--sizes", "8 16"]
    words += ["--seeds", "5", "--rule", "sqrt", "--fits", "8", "--factors", "0.5,1", "--warmup", "64", "--clip", "1"]
    words += ["--decay", "cosine", "--kind", "adam", "--evaluations", "4", "--html", str(page)]
    done = runner.invoke(app, words)
    assert done.exit_code == 0, done.output
    assert told.pop("on_part") is not None
    assert told == {
        "make": Maker("a.py:make_target", ("wide",)), "sizes": [8, 16], "plan": Plan(4096, 4, kind="adam"),
        "seeds": 5, "fits": 8,
        "present": Setting(16, rule="sqrt", warmup_samples=64, decay="cosine", clip_norm=1.0), "factors": [0.5, 1.0],
    }  # fmt: skip
    assert "efficiency candidate: 64" in done.stdout
    assert "1 of 3 diverged" in done.stdout
    for picture in found.pictures(page.read_text()):
        found.check(picture)
    machine = runner.invoke(app, [*words, "--json"])
    made = json.loads(machine.stdout)
    assert made["conclusion"]["kind"] == "rate"
    assert made["arms"][3]["runs"][1]["final_loss"] is None  # JSON has no infinity


def test_a_small_scan_from_the_command_line() -> None:
    words = ["batch", "scan", TARGET, "--samples", "256", "--base", "16", "--sizes", "16,32", "--seeds", "1"]
    done = runner.invoke(app, [*words, "--evaluations", "1"])
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith("Undetermined")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["run.toml"], "compares trainings by their held-out loss, which a reinforcement-learning run doesn't have"),
        ([TARGET, "--factors", "half"], "--factors = 'half': numbers are needed"),
        ([TARGET, "--sizes", "16"], "two or more"),
        ([TARGET, "--rule", "cubic"], "rule = 'cubic': one of"),
        ([TARGET, "--kind", "lion"], "--kind = 'lion': one of sgd, adam, adamw, muon"),
        ([TARGET, "--decay", "step"], "decay = 'step': one of"),
    ],
)
def test_mistakes_are_named_with_the_way_out(words: list[str], says: str) -> None:
    done = runner.invoke(app, ["batch", "scan", *words, "--samples", "256", "--base", "16"])
    assert done.exit_code == 2
    assert says in done.stderr
