"""By hand, from a small net's sizes."""

import pytest
import torch
from torch import nn

from stoker.batch.predicting import optimizer_kind, predicted
from stoker.batch.target import Target
from stoker.batch.tracing import Trace, trace
from stoker.errors import ConfigError

WIDTH, WIDE, FLOAT = 8, 32, 4
PARAMETERS = WIDTH * WIDE + WIDE + WIDE + 1


def traced() -> Trace:
    net = nn.Sequential(nn.Linear(WIDTH, WIDE), nn.Sigmoid(), nn.Linear(WIDE, 1))
    return trace(
        Target(
            model=net,
            optimizer=torch.optim.SGD(net.parameters()),
            make_batch=lambda size: torch.randn(size, WIDTH),
            loss=lambda model, batch: model(batch).sum(),
        )
    )


def some(maker: type[torch.optim.Optimizer], **settings: object) -> torch.optim.Optimizer:
    return maker([nn.Parameter(torch.zeros(2, 2))], **settings)


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
        (some(torch.optim.Muon), FLOAT * (matrices + 2 * (PARAMETERS - matrices))),
        ("adamw_8bit", 2.03125 * PARAMETERS),
    ):
        assert predicted(traced(), 1, optimizer).row("optimizer states") == expected
    for settings, expected in (({"fused": True}, 0), ({"foreach": True}, PARAMETERS), ({}, 2 * WIDTH * WIDE)):
        found = predicted(traced(), 1, some(torch.optim.AdamW, **settings))
        assert found.row("optimizer's temporaries") == FLOAT * expected


def test_optimizers_whose_states_are_not_known() -> None:
    for optimizer in (some(torch.optim.Rprop), some(torch.optim.Adam, amsgrad=True)):
        with pytest.raises(ConfigError, match=r"stoker\.batch\.fit"):
            optimizer_kind(optimizer)
    for name in ("adafactor", "adam"):
        with pytest.raises(ConfigError, match=name):
            predicted(traced(), 1, name)
