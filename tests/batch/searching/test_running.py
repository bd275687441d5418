"""Searches: a planted optimum, pruning, going on after a kill, and files made with other settings."""

import json
import math
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from stoker.batch import Maker, Target
from stoker.batch.searching import Searched, Space, search
from stoker.batch.trainings.setting import Setting
from stoker.batch.trainings.training import Plan
from stoker.errors import ConfigError, RunError
from tests.batch.searching_targets import BASE, BEST_BATCH, BEST_FACTOR, planted
from tests.batch.trainings_targets import regression

PRESENT = Setting(BASE)
PLAN = Plan(samples=512, evaluations=4)
SPACE = Space((16, 32, 64, 128), (0.1, 20.0))
TARGETS = Path(__file__).parents[1] / "searching_targets.py"


def searched(storage: Path, *, make: Any = planted, present: Setting = PRESENT, **changed: Any) -> Searched:
    asked = {"plan": PLAN, "space": SPACE, "trials": 24} | changed
    return search(make, present, asked.pop("plan"), asked.pop("space"), storage=storage, **asked)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Searched:
    return searched(tmp_path_factory.mktemp("search") / "study.db")


def test_the_planted_optimum_is_found(found: Searched) -> None:
    best = found.best
    assert best is not None
    assert best.setting.examples_per_update == BEST_BATCH
    assert abs(math.log(best.setting.rate_factor / BEST_FACTOR)) < 0.35
    assert best.setting.base_examples == BASE
    assert found.own is not None and found.own.number == 0  # the present setting comes first
    assert found.own.loss == pytest.approx(1 + 0.1 * (1 + 2 * math.log(BEST_FACTOR) ** 2) + 1 / 512)
    assert "64 examples per update" in found.verdict and "of the present setting" in found.verdict
    assert len(found.trials) == 24


def test_all_complete_trials_saw_as_many_samples_and_pruned_ones_fewer(found: Searched) -> None:
    ends = {end: [trial for trial in found.trials if trial.end == end] for end in ("complete", "pruned", "diverged")}
    assert {trial.samples for trial in ends["complete"]} == {512}
    assert len(ends["pruned"]) >= 3
    assert max(trial.samples for trial in ends["pruned"]) < 512
    assert min(trial.samples for trial in ends["pruned"]) >= 128  # a quarter
    assert 0.1 < found.saved < 0.8


def test_a_pruned_trial_was_worse_than_the_median_of_those_complete_before_it(found: Searched) -> None:
    for trial in found.trials:
        before = [other for other in found.trials if other.number < trial.number and other.end == "complete"]
        if trial.end == "pruned":
            due, _ = trial.losses[-1]
            there = sorted(dict(other.losses)[due] for other in before if due in dict(other.losses))
            middle = (there[(len(there) - 1) // 2] + there[len(there) // 2]) / 2
            assert min(loss for _, loss in trial.losses) > middle


def test_a_diverged_training_has_no_loss_and_is_never_the_best(found: Searched) -> None:
    diverged = [trial for trial in found.trials if trial.end == "diverged"]
    assert diverged  # nine times the rate is no number
    assert all(trial.loss is None and trial is not found.best for trial in diverged)
    assert "inf" not in json.dumps(found.to_json()).lower() and "nan" not in json.dumps(found.to_json()).lower()
    later = found.trials[16:]
    assert sum(trial.end == "diverged" for trial in later) <= 2  # it taught the search to keep away


def test_what_decides_is_told_and_adds_up(found: Searched) -> None:
    assert set(found.importance) == {"batch", "rate_factor"}
    assert sum(found.importance.values()) == pytest.approx(1)


def test_a_search_in_parts_is_the_search_at_once(found: Searched, tmp_path: Path) -> None:
    searched(tmp_path / "study.db", trials=3)
    parts = searched(tmp_path / "study.db", trials=10)
    assert parts.resumed == 3
    assert [trial.setting for trial in parts.trials] == [trial.setting for trial in found.trials[:10]]
    again = searched(tmp_path / "study.db", trials=10)
    assert again.resumed == 10 and len(again.trials) == 10


def test_a_search_whose_process_was_killed_goes_on(found: Searched, tmp_path: Path) -> None:
    maker = Maker(f"{TARGETS}:killed", (str(tmp_path / "counts"), "8"))
    code = (
        "import sys; from pathlib import Path\n"
        "from stoker.batch import Maker\n"
        "from tests.batch.searching.test_running import searched\n"
        f"searched(Path({str(tmp_path / 'study.db')!r}), make=Maker({maker.path!r}, {maker.arguments!r}), trials=10)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60, check=False)
    assert done.returncode == -9
    with sqlite3.connect(tmp_path / "study.db") as file:
        states = [state for (state,) in file.execute("select state from trials order by number")]
    file.close()
    assert states[-1] == "RUNNING" and len(states) == 8
    after = searched(tmp_path / "study.db", make=maker, trials=10)
    assert after.resumed == 7
    assert [trial.setting for trial in after.trials] == [trial.setting for trial in found.trials[:10]]
    with sqlite3.connect(tmp_path / "study.db") as file:
        states = [state for (state,) in file.execute("select state from trials order by number")]
    file.close()
    assert states[7] == "FAIL" and "RUNNING" not in states


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"plan": Plan(samples=1024, evaluations=4)}, "samples was 512, is 1024"),
        ({"space": Space((16, 32), (0.1, 20.0))}, r"space.examples_per_update was \[16, 32, 64, 128\], is \[16, 32\]"),
        ({"present": Setting(BASE, seed=4)}, "present.seed was 0, is 4"),
        ({"make": Maker("other.py:make")}, "target was .*planted, is other.py:make"),
    ],
)
def test_a_file_made_with_other_settings_is_refused(tmp_path: Path, changed: dict[str, Any], named: str) -> None:
    searched(tmp_path / "study.db", trials=1)
    with pytest.raises(ConfigError, match=named):
        searched(tmp_path / "study.db", trials=1, **changed)


def test_a_file_that_is_no_study_is_refused_and_left(tmp_path: Path) -> None:
    (tmp_path / "study.db").write_text("notes")
    with pytest.raises(ConfigError, match="can't be used as a study"):
        searched(tmp_path / "study.db")
    assert (tmp_path / "study.db").read_text() == "notes"
    with pytest.raises(ConfigError, match="there is no folder"):
        searched(tmp_path / "none" / "study.db")


def test_two_searches_at_one_file_are_refused(tmp_path: Path) -> None:
    def make() -> Target:
        searched(tmp_path / "study.db")
        return planted()

    with pytest.raises(RunError, match="another process searches"):
        searched(tmp_path / "study.db", make=make)


def test_an_error_in_a_training_ends_the_search_and_its_trials_stay(tmp_path: Path) -> None:
    made = 0

    def make() -> Target:
        nonlocal made
        made += 1
        if made == 3:
            raise ZeroDivisionError("mine")
        return planted()

    with pytest.raises(ZeroDivisionError, match="mine"):
        searched(tmp_path / "study.db", make=make, trials=5)
    assert searched(tmp_path / "study.db", make=make, trials=4).resumed == 2


def test_no_secret_is_in_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_API_KEY", "abcdef0123456789")
    maker = Maker(f"{TARGETS}:killed", (str(tmp_path / "counts-abcdef0123456789"), "99"))
    searched(tmp_path / "study.db", make=maker, trials=2)
    assert b"abcdef0123456789" not in (tmp_path / "study.db").read_bytes()


def test_without_optuna_the_command_to_install_it_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(ConfigError, match=r"pip install 'stoker\[search\]'"):
        searched(tmp_path / "study.db")
    assert not (tmp_path / "study.db").exists()


@pytest.mark.parametrize("wrong", [{"trials": 0}, {"plan": Plan(samples=512, evaluations=0)}])
def test_searches_of_nothing_are_refused(tmp_path: Path, wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        searched(tmp_path / "study.db", **wrong)


def test_progress_is_told(tmp_path: Path) -> None:
    told: list[tuple[str, float | None]] = []
    searched(tmp_path / "study.db", trials=2, on_part=lambda part, left: told.append((part, left)))
    assert [part for part, _ in told] == ["trial 1 of 2", "trial 2 of 2"]
    assert told[-1][1] == 0


def test_when_all_diverge_the_search_says_so(tmp_path: Path) -> None:
    wild = Space((16, 32), (15.0, 20.0))
    none = searched(tmp_path / "study.db", space=wild, trials=3)
    assert none.best is None and "every one diverged" in str(none)


def test_a_search_whose_first_training_failed_takes_other_settings(tmp_path: Path) -> None:
    def broken() -> Target:
        raise ValueError("no data")

    with pytest.raises(ValueError, match="no data"):
        searched(tmp_path / "study.db", make=broken)
    assert len(searched(tmp_path / "study.db", trials=1).trials) == 1


def test_a_model_that_was_trained_before_is_refused(tmp_path: Path) -> None:
    target = regression()
    with pytest.raises(ConfigError, match="begin with different weights"):
        searched(tmp_path / "study.db", make=lambda: target, trials=2)
