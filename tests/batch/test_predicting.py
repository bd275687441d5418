"""By hand, from a small net's sizes."""

import pytest
import torch
from torch import nn

from stoker.batch.predicting import predicted
from stoker.batch.target import Target
from stoker.batch.tracing import Trace, trace
from stoker.errors import ConfigError

WIDTH, WIDE, FLOAT = 8, 32, 4
PARAMETERS = WIDTH * WIDE + WIDE + WIDE + 1


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDE), nn.Sigmoid(), nn.Linear(WIDE, 1))


def traced() -> Trace:
    model = net()
    return trace(
        Target(
            model=model,
            optimizer=torch.optim.SGD(model.parameters()),
            make_batch=lambda size: torch.randn(size, WIDTH),
            loss=lambda model, batch: model(batch).sum(),
        )
    )


def some(maker: type[torch.optim.Optimizer], least_dims: int = 1, **settings: object) -> torch.optim.Optimizer:
    return maker([weight for weight in net().parameters() if weight.ndim >= least_dims], **settings)


def test_rows() -> None:
    found = predicted(traced(), 10, "adamw")
    assert found.row("weights") == found.row("gradients") == FLOAT * PARAMETERS
    assert found.row("optimizer states") == 2 * FLOAT * PARAMETERS
    assert found.row("optimizer's temporaries") == 2 * FLOAT * WIDTH * WIDE
    assert found.row("activations") == 10 * FLOAT * (WIDTH + WIDE)
    assert found.row("the largest layer's backward pass") == 2 * 10 * FLOAT * WIDE
    assert found.most_examples(found.peak) == 10


def test_states_follow_the_optimizer() -> None:
    matrices = WIDTH * WIDE + WIDE
    for optimizer, expected in (
        (some(torch.optim.SGD), 0),
        (some(torch.optim.SGD, momentum=0.9), FLOAT * PARAMETERS),
        (some(torch.optim.AdamW), 2 * FLOAT * PARAMETERS),
        (some(torch.optim.Muon, 2), FLOAT * matrices),
        ("muon", FLOAT * (matrices + 2 * (PARAMETERS - matrices))),
        ("adamw_8bit", 2.03125 * PARAMETERS),
    ):
        assert predicted(traced(), 1, optimizer).row("optimizer states") == expected
    for settings, expected in (({"fused": True}, 0), ({"foreach": True}, PARAMETERS), ({}, 2 * WIDTH * WIDE)):
        found = predicted(traced(), 1, some(torch.optim.AdamW, **settings))
        assert found.row("optimizer's temporaries") == FLOAT * expected


def test_an_optimizer_of_no_known_kind_shows_its_states() -> None:
    """RMSprop, Rprop, amsgrad: `stoker batch memory` refused these trainings."""
    for optimizer, moments in (
        (some(torch.optim.RMSprop, momentum=0.9), 2),
        (some(torch.optim.Rprop), 2),
        (some(torch.optim.Adam, amsgrad=True), 3),
    ):
        found = predicted(traced(), 1, optimizer)
        assert found.row("optimizer states") == moments * FLOAT * PARAMETERS
        assert type(optimizer).__name__ in found.name


def test_optimizers_whose_states_are_not_known() -> None:
    with pytest.raises(ConfigError, match=r"LBFGS.*stoker batch fit"):
        predicted(traced(), 1, some(torch.optim.LBFGS))
    for name in ("adafactor", "adam"):
        with pytest.raises(ConfigError, match=name):
            predicted(traced(), 1, name)
