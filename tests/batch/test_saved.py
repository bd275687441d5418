"""Bytes are worked out by hand from what PyTorch's derivative formulas save."""

import gc

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from stoker.batch.saved import SavedTensors, storages

ROWS, WIDTH, FLOAT = 3, 8, 4


class Net(nn.Module):
    """Two linear maps with a sigmoid between them, which keeps its own output alone."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 2 * WIDTH)
        self.act = nn.Sigmoid()
        self.second = nn.Linear(2 * WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.act(self.first(x))
        out: Tensor = self.second(hidden)
        return out


def watch(net: nn.Module, *given: Tensor) -> SavedTensors:
    keys = {module: name for name, module in net.named_modules()}
    return SavedTensors(keys, [*net.parameters(), *given])


def test_each_storage_counts_once_for_the_module_that_keeps_it_first() -> None:
    net, x = Net(), torch.randn(ROWS, WIDTH)
    with watch(net) as saved:
        loss = net(x).square().sum()
        # x by the first map; the sigmoid's output, which the second map keeps too; what is squared
        assert saved.count() == {
            "first": ROWS * WIDTH * FLOAT,
            "act": ROWS * 2 * WIDTH * FLOAT,
            None: ROWS * FLOAT,
        }
        del loss


def test_what_is_given_does_not_count() -> None:
    net, x = Net(), torch.randn(ROWS, WIDTH)
    with watch(net, x) as saved:
        loss = net(x).sum()
        assert saved.count() == {"act": ROWS * 2 * WIDTH * FLOAT}
        del loss


def test_a_view_holds_its_whole_storage() -> None:
    net, x = nn.Linear(WIDTH, 1), torch.randn(ROWS, 10, WIDTH)
    with watch(net) as saved:
        loss = net(x[:, 0]).sum()
        assert saved.count() == {"": x.nbytes}
        del loss


def test_what_the_graph_has_let_go_of_does_not_count() -> None:
    net, x = Net(), torch.randn(ROWS, WIDTH)
    with watch(net) as saved:
        loss = net(x).sum()
        assert saved.count()
        del loss
        gc.collect()
        assert saved.count() == {}


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpointed_part_keeps_its_input_alone(reentrant: bool) -> None:
    net, x = Net(), torch.randn(ROWS, WIDTH, requires_grad=True)
    with watch(net) as saved:
        loss = checkpoint(net, x, use_reentrant=reentrant).sum()
        assert saved.count() == {None: x.nbytes}
        loss.backward()
    assert x.grad is not None


def test_gradients_are_the_same_and_no_hook_stays() -> None:
    net, x = Net(), torch.randn(ROWS, WIDTH)
    net(x).sum().backward()
    expected = [weight.grad for weight in net.parameters()]
    net.zero_grad()
    with watch(net):
        net(x).sum().backward()
    for weight, gradient in zip(net.parameters(), expected, strict=True):
        assert gradient is not None and weight.grad is not None and torch.equal(weight.grad, gradient)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in net.modules())


def test_a_module_that_fails_leaves_the_modules_at_work_right() -> None:
    class Fails(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise ValueError

    class Tolerant(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fails = Fails()

        def forward(self, x: Tensor) -> Tensor:
            try:
                self.fails(x)
            except ValueError:
                return x.sigmoid()
            raise AssertionError

    net, x = Tolerant(), torch.randn(ROWS, WIDTH, requires_grad=True)
    with watch(net) as saved:
        out = net(x)
        assert saved.count() == {"": ROWS * WIDTH * FLOAT}
        del out


def test_sparse_tensors_lie_in_several_storages() -> None:
    eye = torch.eye(4)
    assert sum(part.nbytes() for part in storages(eye.to_sparse())) == 2 * 4 * 8 + 4 * FLOAT
    assert [part.nbytes() for part in storages(eye)] == [eye.nbytes]
