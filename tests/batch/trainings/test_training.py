"""One training of a target at a setting: what is equal between settings, what is noted, and what ends it."""

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stoker.batch import NoiseScale, Target
from stoker.batch.in_process import unchanged
from stoker.batch.trainings.history import History
from stoker.batch.trainings.setting import Setting
from stoker.batch.trainings.training import Plan, train, train_anew
from stoker.errors import ConfigError
from tests.batch.trainings_targets import regression


def seen_by(setting: Setting, samples: int = 1024) -> tuple[History, list[Tensor]]:
    """The examples of a training, in order."""
    seen: list[Tensor] = []

    def make() -> Target:
        target = regression()
        inner = target.loss

        def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
            seen.extend(batch[0])
            return inner(model, batch)

        target.loss = loss
        return target

    return train_anew(make, setting, Plan(samples)), seen


def test_settings_of_one_seed_see_the_same_examples_in_the_same_order() -> None:
    small, large = seen_by(Setting(16))[1], seen_by(Setting(128))[1]
    accumulated = seen_by(Setting(128, examples_per_microbatch=16))[1]
    other = seen_by(Setting(16, seed=1))[1]
    assert len(small) == 1024
    assert torch.equal(torch.stack(small), torch.stack(large))
    assert torch.equal(torch.stack(small), torch.stack(accumulated))
    assert not torch.equal(torch.stack(small), torch.stack(other))


def test_a_training_repeats_itself_and_leaves_random_numbers_alone() -> None:
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    first = train_anew(lambda: regression(dropout=0.2), Setting(32), Plan(1024))
    assert torch.equal(torch.rand(1), expected)
    second = train_anew(lambda: regression(dropout=0.2), Setting(32), Plan(1024))
    assert first.loss == second.loss
    assert [each.loss for each in first.evaluations] == [each.loss for each in second.evaluations]


def test_accumulated_updates_are_those_of_the_whole() -> None:
    whole = train_anew(regression, Setting(64), Plan(1024))
    parts = train_anew(regression, Setting(64, examples_per_microbatch=16), Plan(1024))
    assert whole.loss == pytest.approx(parts.loss, rel=1e-5)
    assert whole.gradient_norm == pytest.approx(parts.gradient_norm, rel=1e-4)


def test_series_have_one_entry_per_update_and_evaluations_are_even() -> None:
    history = train_anew(regression, Setting(100), Plan(1000, evaluations=4))
    assert history.samples == list(range(100, 1001, 100))
    for series in (history.loss, history.gradient_norm, history.learning_rate, history.seconds, history.waited):
        assert len(series) == 10
    assert [each.samples for each in history.evaluations] == [300, 500, 800, 1000]
    assert history.final_loss == history.evaluations[-1].loss < history.evaluations[0].loss
    assert history.ended == ""


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        (Setting(64, base_examples=16), 0.2),  # SGD: linear
        (Setting(64, base_examples=16, rule="sqrt"), 0.1),
        (Setting(64, base_examples=16, rule="keep", rate_factor=3.0), 0.15),
        (Setting(64, rate_factor=0.5), 0.025),
    ],
)
def test_the_rate_follows_the_setting(setting: Setting, expected: float) -> None:
    history = train_anew(regression, setting, Plan(512))
    assert history.learning_rate == pytest.approx([expected] * 8)


def test_warm_up_and_decay_go_by_samples() -> None:
    history = train_anew(regression, Setting(64, warmup_samples=256, decay="linear"), Plan(512))
    assert history.learning_rate == pytest.approx([0.05 * f for f in (0.25, 0.5, 0.75, 1.0, 0.75, 0.5, 0.25, 0.0)])


def test_a_training_that_diverges_says_so_and_where() -> None:
    history = train_anew(regression, Setting(16, rate_factor=1e4), Plan(4096))
    assert history.diverged
    assert history.ended.startswith("diverged: ")
    assert history.final_loss == math.inf
    assert len(history.loss) < 256


def test_clipping_bounds_the_step_and_shows_the_norm_before() -> None:
    free = train_anew(regression, Setting(64), Plan(64))
    held = train_anew(regression, Setting(64, clip_norm=1e-6), Plan(64))
    assert free.gradient_norm == held.gradient_norm
    first = regression()
    before = [weight.detach().clone() for weight in first.model.parameters()]
    train(first, Setting(64, clip_norm=1e-6), Plan(64))
    after = [weight.detach() for weight in first.model.parameters()]
    moved = math.sqrt(sum(float((a - b).square().sum()) for a, b in zip(after, before, strict=True)))
    assert moved == pytest.approx(0.05 * 1e-6, rel=0.1)


def test_branches_from_one_state_differ_in_nothing_but_their_setting() -> None:
    target = regression()
    train(target, Setting(32), Plan(512))
    ended = []
    for _ in range(2):
        with unchanged(target):
            ended.append(train(target, Setting(32, rate_factor=2.0), Plan(512), first_epoch=9))
    assert ended[0].loss == ended[1].loss
    assert ended[0].learning_rate[0] == pytest.approx(0.1)


def test_evaluations_are_in_eval_mode_and_training_goes_on_in_training_mode() -> None:
    modes: list[tuple[str, bool]] = []

    def make() -> Target:
        target = regression(dropout=0.1)
        inner_loss, inner_validate = target.loss, target.validate
        assert inner_validate is not None

        def loss(model: nn.Module, batch: object) -> Tensor:
            modes.append(("loss", model.training))
            return inner_loss(model, batch)

        def validate(model: nn.Module) -> dict[str, float]:
            modes.append(("validate", model.training))
            return {"loss": float(inner_validate(model)), "accuracy": 0.5}  # type: ignore[arg-type]

        target.loss, target.validate = loss, validate
        return target

    history = train_anew(make, Setting(256), Plan(512, evaluations=2))
    assert modes == [("loss", True), ("validate", False), ("loss", True), ("validate", False)]
    assert history.evaluations[0].figures == {"accuracy": 0.5}


def test_noise_is_measured_where_an_update_has_several_microbatches() -> None:
    meter = NoiseScale(smoothing=1.0, every=1)
    train_anew(regression, Setting(64, examples_per_microbatch=8, rate_factor=1e-6), Plan(4096), noise=meter)
    assert meter.estimate().scale is not None


def test_stopping_is_asked_after_each_evaluation() -> None:
    history = train_anew(
        regression, Setting(64), Plan(1024, evaluations=4), stop=lambda told: len(told.evaluations) == 2
    )
    assert history.ended == "stopped at update 8"


def without(name: str) -> Callable[[], Target]:
    def make() -> Target:
        target = regression()
        setattr(target, name, None)
        return target

    return make


def lbfgs() -> Target:
    target = regression()
    target.optimizer = torch.optim.LBFGS(target.model.parameters())
    return target


def validating(found: Any) -> Callable[[], Target]:
    def make() -> Target:
        target = regression()
        target.validate = lambda model: found
        return target

    return make


def loading(*sizes: int) -> Callable[[], Target]:
    """An epoch of batches of those sizes."""

    def make() -> Target:
        target = regression()
        target.load = lambda size, options: [target.make_batch(each) for each in sizes]
        return target

    return make


def of_nothing() -> Target:
    target = regression()
    target.load = lambda size, options: None  # type: ignore[assignment,return-value]
    return target


@pytest.mark.parametrize(
    ("make", "setting", "words"),
    [
        (without("load"), Setting(16), "no `load`"),
        (without("validate"), Setting(16), "no `validate`"),
        (lbfgs, Setting(16), "LBFGS computes the loss itself"),
        (validating({"accuracy": 0.5}), Setting(16), "accuracy without a 'loss'"),
        (validating({}), Setting(16), "no figure without a 'loss'"),
        (validating(None), Setting(16), "a NoneType as its loss"),
        (validating("0.5"), Setting(16), "a str as its loss"),
        (validating((0.5, 1.0)), Setting(16), "a tuple as its loss"),
        (validating(torch.ones(2)), Setting(16), "a tensor of 2 numbers as its loss"),
        (validating({"loss": 0.5, "of": "all"}), Setting(16), "a str as its of"),
        (of_nothing, Setting(16), "gives a NoneType, not the batches"),
        (loading(16, 16, 8, 16), Setting(16), "a batch of 8 examples and others after it"),
        (loading(*[16] * 8), Setting(32), "a batch of 16 examples and others after it"),
        (loading(*[16] * 8), Setting(8), "a batch of 16 examples: make each of 8"),
        (loading(8), Setting(16), "holds no update of 16 examples"),
        (regression, Setting(1024), "holds no update of 1024 examples"),
        (lambda: 3, Setting(16), "not a int"),
    ],
)
def test_what_cannot_be_trained_is_refused(make: Callable[[], Target], setting: Setting, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        train_anew(make, setting, Plan(512))


@pytest.mark.parametrize(
    ("keywords", "words"),
    [
        ({"examples_per_update": 0}, "examples_per_update = 0"),
        ({"examples_per_update": 10, "examples_per_microbatch": 4}, "not a multiple of 4"),
        ({"examples_per_update": 8, "rate_factor": 0.0}, "rate_factor"),
        ({"examples_per_update": 8, "clip_norm": 0.0}, "clip_norm"),
        ({"examples_per_update": 8, "warmup_samples": -1}, "warmup_samples"),
    ],
)
def test_settings_that_cannot_be_are_refused(keywords: dict[str, float], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Setting(**keywords)  # type: ignore[arg-type]


def test_a_smaller_last_batch_is_left_out() -> None:
    """As it is where it would be a part of an accumulated update: samples are counted by what was asked for."""
    ragged, even = (train_anew(loading(*sizes), Setting(16), Plan(128)) for sizes in ((16, 16, 4), (16, 16)))
    assert ragged.loss == even.loss


def test_batches_whose_examples_lie_elsewhere_are_taken_as_they_are() -> None:
    def make() -> Target:
        target = loading(8, 8, 8)()
        target.take = lambda batch, rows: batch
        return target

    assert len(train_anew(make, Setting(16), Plan(64)).loss) == 4


@pytest.mark.parametrize("found", [torch.tensor([0.5]), {"loss": torch.tensor(0.5), "accuracy": 1}])
def test_figures_of_one_number_are_taken(found: Any) -> None:
    assert train_anew(validating(found), Setting(16), Plan(64)).final_loss == 0.5


def test_agreement_is_the_cosine_of_neighbouring_gradients() -> None:
    """Against gradients copied by a hook, clipping included; and it changes nothing."""
    gradients: list[Tensor] = []

    def make() -> Target:
        target = regression()

        def copy(*_: object) -> None:
            gradients.append(torch.cat([weight.grad.flatten().clone() for weight in target.model.parameters()]))  # type: ignore[union-attr]

        target.optimizer.register_step_pre_hook(copy)
        return target

    found = train_anew(make, Setting(32, clip_norm=0.1), Plan(512, agreement=True))
    expected = [float(torch.cosine_similarity(a, b, dim=0)) for a, b in pairwise(gradients)]
    assert found.agreement == pytest.approx([0.0, *expected], abs=1e-5)
    plain = train_anew(regression, Setting(32, clip_norm=0.1), Plan(512))
    assert plain.agreement == [] and plain.loss == found.loss
