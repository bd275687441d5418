"""The bench plants what it says, and its account of outcomes."""

import torch

from bench import curves
from bench.curve_tasks import FAMILIES, spoiled, target


def test_settings_plant_one_fault_each() -> None:
    family = FAMILIES["digits"]
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


def test_a_few_runs(monkeypatch, capsys) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setitem(
        FAMILIES, "digits", FAMILIES["digits"].__class__(**{**vars(FAMILIES["digits"]), "samples": 2000})
    )
    done = [curves.trained(FAMILIES["digits"], 7, kind) for kind in ("", "rate x 30")]
    outcomes = curves.Outcomes(done)
    assert outcomes.healthy(done[0]) and outcomes.regret(done[1]) > 0.5
    scored = curves.score(done, outcomes)
    assert scored["recall_top2"] == 1.0 and scored["healthy_runs"] == 1
    assert "rate x 30" in curves.table(scored)


def test_dead_units_give_nothing() -> None:
    made = target(FAMILIES["digits"], dead=True)
    outputs = made.model(torch.rand(8, 1, 8, 8))
    assert torch.allclose(outputs, outputs[:1].expand_as(outputs))
