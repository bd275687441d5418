"""The bench plants what it says, and its account of outcomes."""

from dataclasses import replace

import torch

from bench import curves
from bench.curve_families import SEEN
from bench.curve_grids import Grid, gridded
from bench.curve_later import LATER
from bench.curve_tasks import spoiled, target


def test_settings_plant_one_fault_each() -> None:
    family = SEEN["digits"]
    made = {kind: curves.settings(family, 3, kind) for kind in curves.KINDS}
    assert made["rate x 30"][0].rate_factor == 30 and made["rate / 30"][0].rate_factor == 1 / 30
    assert made["batch 1"][0].examples_per_update == 1
    assert family.samples // made["few updates"][0].examples_per_update == 16
    assert {curves.settings(family, seed, "bad data")[1] for seed in range(3)} == {"labels", "rows", "shard"}
    assert curves.settings(family, 0, "") == curves.settings(family, 0, "")


def test_spoiled_rows_are_of_the_share() -> None:
    inputs, answers = torch.rand(1000, 4), torch.arange(1000.0)
    other, wrong = spoiled(inputs, answers, "labels", 0.3)
    assert torch.equal(other, inputs) and 0.28 < (wrong != answers).float().mean() <= 0.3
    rows, same = spoiled(inputs, answers, "rows", 0.1)
    assert torch.equal(same, answers) and int((rows != inputs).any(1).sum()) == 100
    stretch = (spoiled(inputs, answers, "shard", 0.2)[1] != answers).nonzero()
    assert int(stretch.min()) >= 450 and int(stretch.max()) < 650


def test_a_few_runs() -> None:
    family = replace(SEEN["digits"], samples=1500, rate=0.1)
    done = [curves.trained(family, 7, kind) for kind in ("", "rate x 30")]
    grids = {"digits": Grid(family, 2.31, done[0].history.final_loss, {})}
    assert curves.harmed(done[1], grids["digits"])
    scored = curves.score(done, grids)
    assert scored["recall_top2"] == 1.0 and scored["healthy_runs"] == 1
    assert "rate x 30" in curves.table(scored)


def test_a_grid_goes_on_until_the_best_rate_lies_inside() -> None:
    family = replace(SEEN["digits"], samples=320, rate=0.002)
    grid = gridded(family)
    tried = sorted(factor for size, factor in grid.cells if size == family.examples)
    assert tried[0] < grid.family.rate / family.rate < tried[-1] and tried[-1] > 16
    assert grid.best == min(grid.cells.values()) < grid.untrained
    assert "examples" in str(grid)


def test_families_are_of_one_shape() -> None:
    assert not SEEN.keys() & LATER.keys()
    for family in LATER.values():
        inputs, answers, held_inputs, held_answers = family.data()
        assert len(inputs) == len(answers) and len(held_inputs) == len(held_answers)
        family.loss(family.model()(inputs[:4]), answers[:4]).backward()


def test_dead_units_give_nothing() -> None:
    made = target(SEEN["digits"], dead=True)
    outputs = made.model(torch.rand(8, 1, 8, 8))
    assert torch.allclose(outputs, outputs[:1].expand_as(outputs))
