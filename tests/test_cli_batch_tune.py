"""`stoker batch search` and `stoker batch critical`: what a user types and reads. What is found is tested elsewhere."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from stoker.batch.critical import measuring
from stoker.batch.searching import running
from stoker.batch.searching.space import Space
from stoker.batch.target import Maker
from stoker.batch.trainings.setting import Setting
from stoker.batch.trainings.training import Plan
from stoker.cli import app
from tests.report import found
from tests.report.test_search import SEVERAL

runner = CliRunner()
TARGET = "tests/batch/trainings_targets.py:regression"
PLANTED = "tests/batch/searching_targets.py:planted"
SEARCH = ["batch", "search", "--samples", "512", "--present", "32"]
CRITICAL = ["batch", "critical", "--samples", "256", "--base", "8"]


def test_search_hands_its_options_on_prints_and_draws(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    page, told = tmp_path / "page.html", {}

    def search(make: Maker, present: Setting, plan: Plan, space: Space, **more: Any) -> Any:
        told.update(make=make, present=present, plan=plan, space=space, **more)
        return SEVERAL

    monkeypatch.setattr(running, "search", search)
    words = ["batch", "search", "a.py:make_target", "wide", "--samples", "4096", "--present", "64", "--base", "16"]
    words += ["--sizes", "16,64,128", "--rate-factors", "0.5,4", "--warmups", "0,512", "--trials", "7"]
    words += ["--storage", "own.db", "--microbatch", "128", "--rule", "sqrt", "--warmup", "64", "--decay", "cosine"]
    words += ["--clip", "1", "--evaluations", "4", "--html", str(page)]
    done = runner.invoke(app, words)
    assert done.exit_code == 0, done.output
    assert told.pop("on_part") is not None
    present = Setting(64, 16, "sqrt", examples_per_microbatch=64, warmup_samples=64, decay="cosine", clip_norm=1.0)
    assert told == {
        "make": Maker("a.py:make_target", ("wide",)), "present": present, "plan": Plan(4096, 4), "trials": 7,
        "space": Space((16, 64, 128), (0.5, 4.0), (0, 512)), "storage": Path("own.db"),
    }  # fmt: skip
    assert done.stdout.startswith("Best of 6: 128 images per update")
    for picture in found.pictures(page.read_text()):
        found.check(picture)
    machine = runner.invoke(app, [*words, "--json"])
    made = json.loads(machine.stdout)
    assert made["best"] == 4
    assert told["on_part"] is None


def test_a_small_search_goes_on_and_is_held_to_its_settings(tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    words = [*SEARCH, PLANTED, "--storage", str(tmp_path / "study.db"), "--evaluations", "2"]
    first = runner.invoke(app, [*words, "--trials", "2"])
    assert first.exit_code == 0, first.output
    assert "Best of 2" in first.stdout
    more = runner.invoke(app, [*words, "--trials", "3"])
    assert "2 of the trials were in" in more.stdout
    assert "Best of 3" in more.stdout
    assert len(json.loads(runner.invoke(app, [*words, "--trials", "3", "--json"]).stdout)["trials"]) == 3
    other = runner.invoke(app, [*words, "--trials", "3", "--decay", "linear"])
    assert other.exit_code == 2
    assert "present.decay was constant, is linear" in other.stderr


def test_a_search_without_optuna_names_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    done = runner.invoke(app, [*SEARCH, PLANTED, "--storage", str(tmp_path / "study.db")])
    assert done.exit_code == 2
    assert "pip install 'stoker[search]'" in done.stderr
    assert "stoker[search]" in runner.invoke(app, ["batch", "search", "--help"]).stdout


def test_critical_hands_its_options_on_prints_and_draws(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    page, told = tmp_path / "page.html", {}

    def critical_batch(make: Maker, base: Setting, plan: Plan, **more: Any) -> Any:
        told.update(make=make, base=base, plan=plan, **more)
        return found.critical()

    monkeypatch.setattr(measuring, "critical_batch", critical_batch)
    words = ["batch", "critical", "a.py:make_target", "wide", "--samples", "4096", "--base", "8", "--before", "512"]
    words += ["--multiples", "1,4", "--tolerance", "0.1", "--orders", "2", "--loss", "1.5", "--seeds", "5"]
    words += ["--rule", "keep", "--warmup", "64", "--clip", "1", "--evaluations", "2", "--html", str(page)]
    done = runner.invoke(app, words)
    assert done.exit_code == 0, done.output
    assert told.pop("tell") is not None
    assert told == {
        "make": Maker("a.py:make_target", ("wide",)), "plan": Plan(4096, 2), "before": 512, "multiples": [1, 4],
        "base": Setting(8, rule="keep", warmup_samples=64, clip_norm=1.0), "tolerance": 0.1, "orders": 2, "loss": 1.5,
        "seeds": 5,
    }  # fmt: skip
    assert done.stdout.startswith("critical batch by branches")
    for picture in found.pictures(page.read_text()):
        found.check(picture)
    machine = runner.invoke(app, [*words, "--json"])
    assert json.loads(machine.stdout)["base_examples"] == found.critical().base_examples


def test_a_small_critical_batch_from_the_command_line() -> None:
    done = runner.invoke(app, [*CRITICAL, TARGET, "--multiples", "1,4", "--orders", "2", "--before", "128", "--json"])
    assert done.exit_code == 0, done.output
    made = json.loads(done.stdout)
    assert [rung["examples_per_update"] for rung in made["branched"]["rungs"]] == [8, 32]
    assert made["noise"] is not None
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([*SEARCH, "run.toml"], "`stoker batch search` compares trainings by their held-out loss"),
        ([*SEARCH, TARGET, "--rule", "cubic"], "rule = 'cubic': one of"),
        ([*SEARCH, TARGET, "--sizes", "64,32"], "whole numbers, ascending"),
        ([*SEARCH, TARGET, "--rate-factors", "half"], "--rate-factors = 'half': numbers are needed"),
        ([*SEARCH, TARGET, "--rate-factors", "0.5"], "--rate-factors: two numbers are needed, the least and the most"),
        ([*SEARCH, TARGET, "--warmups", "1,2,3"], "--warmups: two numbers are needed"),
        ([*SEARCH, TARGET, "--storage", "no/study.db"], "there is no folder no"),
        ([*CRITICAL, "run.toml"], "`stoker batch critical` compares trainings by their held-out loss"),
        ([*CRITICAL, TARGET, "--rule", "cubic", "--multiples", "1,4"], "rule = 'cubic': one of"),
        ([*CRITICAL, TARGET, "--multiples", "2,4"], "1 and then larger ones, ascending"),
        ([*CRITICAL, TARGET, "--multiples", "1,64"], "take 2,048 samples or more, or smaller multiples"),
        ([*CRITICAL, TARGET, "--multiples", "1,4", "--tolerance", "0"], "a positive difference of losses"),
    ],
)
def test_mistakes_are_named_with_the_way_out(
    words: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [f"{Path.cwd()}/{word}" if word == TARGET else word for word in words]
    monkeypatch.chdir(tmp_path)
    done = runner.invoke(app, words)
    assert done.exit_code == 2
    assert says in done.stderr.replace("\n", " ")
    assert list(tmp_path.iterdir()) == []  # no study of a mistake
