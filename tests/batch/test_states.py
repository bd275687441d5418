"""A twin's states against those of the optimizer itself, after real steps."""

import pytest
import torch
from torch import Tensor, nn

from stoker.batch.states import state_bytes

optim = torch.optim


def held(optimizer: torch.optim.Optimizer) -> int:
    states = [value for state in optimizer.state.values() for value in state.values()]
    return sum(value.nbytes for value in states if isinstance(value, Tensor) and value.ndim)


@pytest.mark.parametrize(
    ("maker", "settings"),
    [
        (optim.AdamW, {}),
        (optim.AdamW, {"amsgrad": True, "fused": True}),
        (optim.Adam, {"lr": torch.tensor(0.1)}),
        (optim.SGD, {"lr": 0.1}),
        (optim.SGD, {"lr": 0.1, "momentum": 0.9}),
        (optim.RMSprop, {"centered": True, "momentum": 0.9}),
        (optim.Adagrad, {}),
        (optim.Adadelta, {}),
        (optim.Rprop, {}),
    ],
)
def test_as_after_real_steps_and_nothing_is_touched(maker: type, settings: dict[str, object]) -> None:
    model = nn.Linear(8, 4)
    model.bias.requires_grad_(False)
    optimizer = maker([{"params": [model.weight]}, {"params": [model.bias]}], **settings)
    optim.lr_scheduler.StepLR(optimizer, 3)
    before = model.weight.detach().clone()
    states = len(optimizer.state)
    found = state_bytes(optimizer)
    assert torch.equal(model.weight, before)
    assert model.weight.grad is None
    assert len(optimizer.state) == states
    model.weight.grad = torch.ones_like(model.weight)
    optimizer.step()
    assert found == held(optimizer)
    assert state_bytes(optimizer) == found  # with states that are there already


def test_unknown_where_a_step_needs_values() -> None:
    assert state_bytes(optim.LBFGS(nn.Linear(2, 2).parameters())) is None
