"""The whole procedure on a training of milliseconds, and its choices one by one."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from stoker.batch import Setting, explain
from stoker.batch.explaining import procedure
from stoker.batch.explaining.gradient import noise_of
from stoker.batch.nest import examples
from stoker.batch.swept import Point
from stoker.batch.target import Maker, Target
from stoker.batch.trainings.training import Plan
from stoker.cli import app
from stoker.errors import ConfigError
from tests.batch.trainings_targets import regression
from tests.report import found

TARGET = "tests/batch/trainings_targets.py:regression"


@pytest.mark.slow
def test_from_the_command_to_the_page(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    words = ["batch", "explain", TARGET, "--present", "64", "--samples", "1024", "--seeds", "2", "--html", str(page)]
    done = CliRunner().invoke(app, [*words, "--json"])
    assert done.exit_code == 0, done.output
    made = json.loads(done.stdout)
    compared = [arm["setting"]["examples_per_update"] for arm in made["scan"]["arms"]]
    assert 64 in compared
    assert made["verdict"]["present"] == 64
    assert made["verdict"]["recommended"] in compared
    assert [each["name"] for each in made["verdict"]["signals"]] == ["throughput", "memory", "validation"]
    assert len(made["accounts"]) == 3
    assert made["fit"]["size"] >= max(arm["setting"]["examples_per_microbatch"] or 0 for arm in made["scan"]["arms"])
    for picture in found.pictures(page.read_text()):
        found.check(picture)
    assert made["verdict"]["words"] in page.read_text()


@pytest.mark.parametrize(
    ("size", "most", "expected"),
    [
        (64, math.inf, [8, 16, 32, 64, 128, 256, 512]),
        (64, 300, [8, 16, 32, 64, 128, 256]),
        (7, 20, [1, 3, 7, 14]),
        (1, math.inf, [1, 2, 4, 8]),
    ],
)
def test_the_ladder_halves_and_doubles(size: int, most: float, expected: list[int]) -> None:
    assert procedure._ladder(size, most) == expected


def test_a_batch_without_another_is_refused() -> None:
    with pytest.raises(ConfigError, match="no other to compare it with"):
        procedure._ladder(1, 1)


def test_compared_are_batches_up_to_the_first_small_gain_and_down_to_those_that_are_not_too_slow() -> None:
    ladder = [8, 16, 32, 64, 128, 256, 512]
    seconds = {8: 1.0, 16: 1.0, 32: 1.0, 64: 1.0, 128: 1.0, 256: 1.9, 512: 3.8}  # 8 takes eight times as long as 64
    points = [Point(size, took, (took, took), size / took, None, None) for size, took in seconds.items()]
    swept = found.sweep().__class__(**{**vars(found.sweep()), "points": tuple(points)})
    assert procedure._compared(64, swept, ladder) == [16, 32, 64, 128, 256]  # 128 to 256 gains 5 %


def test_noise_of_a_loss_over_tokens_is_told_in_examples() -> None:
    """Every example counts three tokens: three times the scale in tokens, and the same in examples."""

    def counting() -> Target:
        target = regression()
        target.count = lambda batch: 3.0 * examples(batch)
        return target

    setting, plan = Setting(64, rate_factor=1e-6), Plan(16_384)
    plain, counted = noise_of(regression, setting, plan), noise_of(counting, setting, plan)
    assert plain is not None
    assert plain.scale is not None
    assert counted is not None
    assert counted.scale is not None
    assert counted.scale.value == pytest.approx(plain.scale.value)
    assert noise_of(regression, Setting(1), plan) is None


def test_a_target_that_cannot_be_trained_is_told_before_anything_is_measured() -> None:
    with pytest.raises(ConfigError, match="`load`"):
        explain("tests/batch/fit_targets.py:plain", 64)
    with pytest.raises(ConfigError, match="1,024 examples, but the data set has 512"):
        explain(TARGET, 1024)


def adagrad() -> Target:
    target = regression()
    target.optimizer = torch.optim.Adagrad(target.weights())
    return target


@pytest.mark.parametrize(
    ("present", "samples", "made", "words"),
    [
        (64, 63, regression, "samples = 63: fewer than one update of 64"),
        (1, 1, regression, "a batch of 1 of 1 examples: there is no other"),
        (64, None, adagrad, "no rule is known for a Adagrad.*--kind"),
    ],
)
def test_what_cannot_be_compared_is_told_before_anything_is_measured(
    present: int, samples: int | None, made: Any, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Maker, "__call__", lambda self: made())
    monkeypatch.setattr(procedure, "fit", lambda *_, **__: pytest.fail("measured"))
    with pytest.raises(ConfigError, match=words):
        explain(TARGET, present, samples=samples)


def test_an_optimizer_without_a_rule_goes_by_the_kind_that_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Maker, "__call__", lambda self: adagrad())
    assert procedure._described(Maker(TARGET), Setting(64), "adam") == 512
