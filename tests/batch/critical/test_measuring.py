"""Branches and trainings to one loss of a real target, small."""

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stoker.batch import LoaderOptions, Target
from stoker.batch.critical.branching import branched, smoothed
from stoker.batch.critical.measuring import critical_batch
from stoker.batch.critical.reaching import measure_tradeoff
from stoker.batch.trainings.history import History
from stoker.batch.trainings.setting import Setting
from stoker.batch.trainings.training import Plan
from stoker.errors import ConfigError
from stoker.report.critical import sections
from stoker.report.html import page
from tests.batch.trainings_targets import regression


def test_branches_leave_a_target_as_it_was_and_see_the_same_examples() -> None:
    seen: dict[int, list[Tensor]] = {}

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        seen.setdefault(len(batch[0]), []).extend(batch[0])
        return ((model(batch[0]).squeeze(1) - batch[1]) ** 2).mean()

    target = replace(regression(), loss=loss)
    before = [weight.detach().clone() for weight in target.model.parameters()]
    found = branched(target, Setting(8), Plan(256, evaluations=2), multiples=(1, 4), orders=2)
    assert all(torch.equal(a, b) for a, b in zip(before, target.model.parameters(), strict=True))
    last = [torch.stack(each[-2 * 256 :]) for each in (seen[8], seen[32])]
    assert torch.equal(*last)
    assert not torch.equal(last[0][:256], last[0][256:])  # two orders
    assert [each.examples_per_update for each in found.rungs] == [8, 32]
    assert found.samples_spent == sum(len(each) for each in seen.values())
    assert [samples for samples, _ in found.rungs[0].curve] == [128, 256]


def test_the_rate_is_searched_for_at_each_batch_and_held_out_loss_decides() -> None:
    found = branched(partial(regression, learning_rate=1e-3), Setting(8), Plan(256, evaluations=1), multiples=(1, 8))
    assert found.measured == "held-out loss"
    assert all(rung.rate_factor >= 16 for rung in found.rungs)  # the target's own is far too low
    for rung in found.rungs:
        assert rung.loss < 0.5 * max(loss for _, loss in rung.tried)
    assert 8 <= found.critical <= 64


def test_without_held_out_data_the_smoothed_training_loss_decides() -> None:
    target = regression()
    target.validate = None
    found = branched(target, Setting(8), Plan(256), multiples=(1, 2), orders=2)
    assert found.measured == "smoothed training loss"
    assert len(found.rungs[0].curve) <= 33 and found.rungs[0].curve[-1][0] == 256


def test_smoothing_forgets_by_samples_at_every_batch() -> None:
    small, large = History(Setting(8), "examples"), History(Setting(16), "examples")
    for update in range(8):
        small.note(8 * (update + 1), 1.0 if update < 4 else 0.0, 1.0, 0.1, 0.1, 0.0)
    for update in range(4):
        large.note(16 * (update + 1), 1.0 if update < 2 else 0.0, 1.0, 0.1, 0.1, 0.0)
    # by hand: each of the last 32 samples' two half-lives of 16, so that 1/4 of weight was before: (1/4) / (1 + 1/4)
    assert smoothed(small, 16)[-1] == (64, pytest.approx(0.2))
    assert smoothed(large, 16)[-1] == (64, pytest.approx(0.2))


@pytest.mark.parametrize(
    ("told", "named"),
    [
        ({"multiples": (2, 4)}, "multiples"),
        ({"multiples": (1,)}, "multiples"),
        ({"tolerance": 0.0}, "tolerance"),
        ({"orders": 0}, "orders"),
        ({"multiples": (1, 64)}, "updates of 512"),
    ],
)
def test_what_can_be_no_measurement_is_refused(told: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        branched(regression, Setting(8), Plan(256), **told)


def test_steps_fall_with_the_batch_and_examples_rise() -> None:
    found = measure_tradeoff(regression, (8, 128), 0.6, Setting(8), Plan(4096, evaluations=64), seeds=3)
    small, large = (sum(each.steps) / len(each.steps) for each in found.batches)
    assert small > large
    assert small * 8 < large * 128
    assert found.tradeoff is not None


def test_a_loss_that_no_batch_reaches_is_told() -> None:
    found = measure_tradeoff(regression, (64, 128), 1e-6, Setting(64), Plan(512, evaluations=4), seeds=1)
    assert found.points == ()
    assert all(math.isinf(each.samples[0]) for each in found.batches)
    assert "reached at 0" in found.unfitted


@pytest.mark.parametrize("sizes", [(8,), (16, 8), (8, 8)])
def test_sizes_rise(sizes: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="ascending"):
        measure_tradeoff(regression, sizes, 0.5, Setting(8), Plan(512))


def test_three_roads_beside_one_another_and_their_page() -> None:
    told: list[str] = []
    found = critical_batch(
        regression,
        Setting(8),
        Plan(256, evaluations=2),
        before=512,
        multiples=(1, 4, 8),
        loss=0.4,
        seeds=1,
        tell=lambda said, left: told.append(said),
    )
    assert found.branched.before == 512
    assert found.noise is not None and found.noise.updates == 64
    assert found.reached is not None
    assert len(told) == 6
    shown = page("Critical batch", "", list(sections(found.to_json())), str(found))
    assert "How far the batch can grow" in shown and "costs and saves" in shown and "noise scale" in shown


def infinite(size: int, options: LoaderOptions) -> Iterator[Tensor]:
    return iter([torch.full((size, 2), math.inf)] * 8)


def test_a_target_that_always_diverges_is_told_so() -> None:
    model = nn.Linear(2, 1)
    target = Target(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        lambda size: torch.full((size, 2), math.inf),
        lambda model, batch: model(batch).square().mean(),
        load=infinite,
        validate=lambda model: 1.0,
    )
    found = branched(target, Setting(1), Plan(8), multiples=(1, 2), orders=1)
    assert math.isinf(found.rungs[0].loss)
    with pytest.raises(ConfigError, match="lower learning rate"):
        critical_batch(lambda: target, Setting(2), Plan(16), before=8, multiples=(1, 2))
