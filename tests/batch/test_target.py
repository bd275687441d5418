"""A target's own checks and its step."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from stoker.batch.target import Maker, Target
from stoker.errors import ConfigError


def made(**more: Any) -> Target:
    model = more.pop("model", None) or nn.Linear(3, 1)
    optimizer = more.pop("optimizer", None) or torch.optim.SGD(model.parameters(), lr=0.1)
    fields = {
        "optimizer": optimizer,
        "make_batch": lambda size: torch.ones(size, 3),
        "loss": lambda model, batch: model(batch).square().mean(),
    }
    return Target(model, **fields | more)


def test_an_optimizer_that_asks_for_the_loss_steps() -> None:
    """LBFGS: "missing 1 required positional argument: 'closure'"."""
    model = nn.Linear(3, 1)
    target = made(model=model, optimizer=torch.optim.LBFGS(model.parameters()))
    torch.optim.lr_scheduler.StepLR(target.optimizer, 1)
    before = target.loss(model, torch.ones(2, 3)).item()
    target.step(2)
    assert target.loss(model, torch.ones(2, 3)).item() < before


def test_a_loss_may_empty_its_batch_and_the_next_step_has_it_again() -> None:
    target = made(loss=lambda model, batch: model(batch.pop("x")).mean())
    batch = {"x": torch.ones(2, 3)}
    for _ in range(2):
        target.step_on(batch)
    assert "x" in batch


def test_weights_beside_the_model_are_weights() -> None:
    """A model without parameters ended in a bare StopIteration."""
    beside = nn.Parameter(torch.ones(3, 1))
    model = nn.Flatten()
    target = made(model=model, optimizer=torch.optim.SGD([beside]), loss=lambda model, batch: (batch @ beside).mean())
    assert target.device == torch.device("cpu")
    assert target.weights() == [beside]
    target.step(2)
    linear = nn.Linear(3, 1)
    tied = made(model=linear, optimizer=torch.optim.SGD([*linear.parameters(), beside]))
    assert [tuple(weight.shape) for weight in tied.weights()] == [(1, 3), (1,), (3, 1)]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"optimizer": nn.Linear(1, 1)}, "optimizer is a Linear, not a torch Optimizer; the order is Target(model"),
        ({"make_batch": 3}, "make_batch is a int, not a function"),
        ({"most": 0}, "most = 0: a whole number of examples"),
        ({"most": 12.5}, "most = 12.5"),
    ],
)
def test_what_is_no_target_is_named(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        made(**fields)
    assert words in str(caught.value)


def test_a_lazy_module_is_to_be_run_first() -> None:
    model = nn.Sequential(nn.LazyLinear(2))
    with pytest.raises(ConfigError, match=r"0\.weight has no shape yet \(a lazy module\): run one batch"):
        made(model=model, optimizer=torch.optim.SGD(nn.Linear(1, 1).parameters()))


def test_a_class_is_no_target(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("from stoker.batch import Target\ndef make():\n    return Target\n")
    with pytest.raises(ConfigError, match="made a type without unit, most, device, step"):
        Maker(f"{tmp_path}/train.py:make")()
