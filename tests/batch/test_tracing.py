"""Bytes are worked out by hand from what PyTorch's derivative formulas save."""

import json
import random

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from stoker.batch.target import Target
from stoker.batch.tracing import Trace, trace
from stoker.errors import ConfigError

WIDTH, FLOAT = 8, 4


class Net(nn.Module):
    """A linear map, BatchNorm and a head whose weight is the map's, seen from the other side."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)
        self.head.weight = self.up.weight

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.drop(self.norm(self.up(x))))
        return out


def target(net: nn.Module, most: int | None = None) -> Target:
    return Target(
        model=net,
        optimizer=torch.optim.SGD(net.parameters(), 0.1),
        make_batch=lambda size: torch.randn(size, WIDTH) + random.random() + np.random.rand(),
        loss=lambda model, batch: model(batch).square().sum(),
        most=most,
    )


def kept(found: Trace) -> dict[str, tuple[int, ...]]:
    return {layer.name: tuple(size for _, size in layer.saved) for layer in found.layers}


def test_each_size_is_told_when_it_is_traced() -> None:
    told: list[tuple[str, float | None]] = []
    trace(target(Net()), on_part=lambda *part: told.append(part))
    assert [what for what, _ in told] == ["2 examples traced", "4 examples traced"]
    assert told[0][1] is not None and told[0][1] > 0
    assert told[1][1] == 0


def test_what_each_layer_keeps() -> None:
    found = trace(target(Net()))
    row, statistics = WIDTH * FLOAT, 2 * WIDTH * FLOAT
    assert kept(found) == {
        "batch": (2 * row, 4 * row),  # `up` keeps it too
        "up": (0, 0),
        "norm": (2 * row + statistics, 4 * row + statistics),  # its input, and mean and deviation at any size
        "drop": (2 * row, 4 * row),  # on a CPU the mask is of the input's type
        "head": (2 * row, 4 * row),
        "loss": (2 * row, 4 * row),
    }
    norm = next(layer for layer in found.layers if layer.name == "norm")
    assert (norm.kind, norm.fixed, norm.per_unit) == ("BatchNorm1d", statistics, row)
    assert found.activations(100) == 100 * 5 * row + statistics


def test_shared_parameters_count_once_and_frozen_ones_have_no_gradient() -> None:
    net = Net()
    net.norm.requires_grad_(False)
    found = trace(target(net))
    matrix = WIDTH * WIDTH + WIDTH
    assert (found.parameters, found.trainable) == (matrix + 2 * WIDTH, matrix)
    assert (found.weight_bytes, found.gradient_bytes) == (FLOAT * found.parameters, FLOAT * matrix)
    assert found.buffer_bytes == 2 * WIDTH * FLOAT + 8  # mean, variance and a count of batches
    assert sum(layer.parameters for layer in found.layers) == found.parameters


def test_the_largest_layer_is_the_one_that_grows_most() -> None:
    net = nn.Sequential(nn.Linear(WIDTH, 100 * WIDTH), nn.Sigmoid(), nn.Linear(100 * WIDTH, 1))
    found = trace(target(net))
    assert found.largest.name == "1" and found.largest.per_unit == 100 * WIDTH * FLOAT


def test_the_model_is_left_as_it_was_found() -> None:
    net = Net()
    net.train()
    net.drop.eval()
    used = target(net)
    used.step(4)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    gradients = [weight.grad for weight in net.parameters()]
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    expected = (torch.rand(1).item(), random.random(), np.random.rand())
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    trace(used)
    assert (torch.rand(1).item(), random.random(), np.random.rand()) == expected
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert all(weight.grad is gradient for weight, gradient in zip(net.parameters(), gradients, strict=True))
    assert net.training and net.norm.training and not net.drop.training


def test_a_loss_that_fails_leaves_it_too() -> None:
    net = Net()
    broken = target(net)
    broken.loss = lambda model, batch: model(batch) @ torch.zeros(3, 3)
    mean = net.norm.running_mean
    with pytest.raises(RuntimeError, match="shapes"):
        trace(broken)
    assert mean is not None and net.norm.running_mean is mean and not mean.any()
    assert not net._forward_hooks and not net.up._forward_pre_hooks


@pytest.mark.parametrize("sizes", [(0, 2), (2, 2), (4, 2)])
def test_sizes_must_rise(sizes: tuple[int, int]) -> None:
    with pytest.raises(ConfigError, match="two sizes"):
        trace(target(Net()), sizes)


def test_a_small_data_set_refuses_larger_sizes() -> None:
    with pytest.raises(ConfigError, match="the data set has 3 examples"):
        trace(target(Net(), most=3))
    assert trace(target(Net(), most=3), (2, 3)).layers


def test_it_prints_and_goes_to_json() -> None:
    found = trace(target(Net()))
    data = json.loads(json.dumps(found.to_json()))
    assert data["parameters"] == found.parameters and data["largest"] == found.largest.name
    assert data["layers"][0]["saved"] == [[2, 2 * WIDTH * FLOAT], [4, 4 * WIDTH * FLOAT]]
    assert str(found).startswith("Net: 88 parameters, 88 of them trained") and "BatchNorm1d" in str(found)
