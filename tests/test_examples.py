"""The examples that ship run as they are, only shorter."""

import runpy
from pathlib import Path

import pytest
import torch

from stoker import dotted
from stoker.batch import Maker, Target, prove, trace
from stoker.config import load as config_load
from stoker.errors import ConfigError
from stoker.rl.tasks import read_rows
from stoker.runner import train

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


@pytest.mark.parametrize("name", ["addition", "addition_ppo"])
def test_an_example_trains(name: str, tmp_path: Path) -> None:
    overrides = [f"runs_dir={tmp_path}", "warm_start.updates=3", "stop.steps=2", "sampling.prompts_per_step=16"]
    config = config_load.load(
        EXAMPLES / f"{name}.toml", [*overrides, "update.samples_per_update=64", "validation.holdout=32"]
    )
    result = train(config, mode="quiet")
    assert result.step == 2
    assert result.policy is not None


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.toml")), ids=lambda path: path.stem)
def test_held_out_prompts_of_an_example_are_in_no_training_row(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(EXAMPLES.parent)  # run files name files from the folder where stoker is called
    rows = read_rows(config_load.load(path))
    train_prompts = {str(row.content) for found in rows.train.values() for row in found}
    held_out = {str(row.content) for found in rows.validation.values() for row in found}
    assert len(held_out) >= 200
    assert not train_prompts & held_out


@pytest.mark.parametrize("name", ["scan_digits", "batch_change"])
def test_an_example_that_compares_trainings_runs(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    main = dotted.load(str(EXAMPLES / f"{name}.py:main"), "example", ConfigError)
    main("--quick")
    printed = capsys.readouterr().out
    assert "128" in printed
    assert "accuracy" in printed


@pytest.mark.parametrize(
    ("name", "words", "size"), [("digits", ("8",), 16), ("ctr", ("2",), 64), ("causal_lm", ("1", "16"), 4)]
)
def test_a_batch_example_trains_and_is_ready_for_every_command(name: str, words: tuple[str, ...], size: int) -> None:
    target = Maker(str(EXAMPLES / f"batch_{name}.py:make_target"), words)()
    assert isinstance(target, Target)
    batch = target.make_batch(size)
    before = target.loss(target.model, batch).item()
    for _ in range(10):
        target.step(size)
    assert target.loss(target.model, batch).item() < before
    assert target.most is not None
    assert trace(target).parameters == sum(parameter.numel() for parameter in target.model.parameters())
    whole, first = (torch.utils._pytree.tree_leaves(target.make_batch(n))[0] for n in (size, 1))
    assert torch.equal(whole[:1], first)  # the longest come first, whatever the size
    assert prove(target, size=size, splits=[size // 2], ranks=(1,)).largest is not None


@pytest.mark.slow
def test_the_multi_device_trap_is_sprung_and_a_rate_that_follows_gets_out_of_it() -> None:
    example = runpy.run_path(str(EXAMPLES / "multi_device_trap.py"))
    found = example["judged"](example["measure"](range(3)))
    assert found.state == "holds"
    ((_, apart),) = found.same
    assert apart < 1e-3  # accumulation at the same global batch is the same training
    assert [share > 0.5 and better.surely_more for _, better, share in found.cures] == [True, True]


@pytest.mark.slow
def test_the_critical_batch_of_a_language_model_is_measured_in_three_ways() -> None:
    found = runpy.run_path(str(EXAMPLES / "critical_lm.py"))["measure"](quick=True)
    assert [rung.examples_per_update for rung in found.branched.rungs] == [8, 32]
    assert found.reached is not None and all(each.steps for each in found.reached.batches)
    assert found.noise is not None and found.noise.updates == 16
