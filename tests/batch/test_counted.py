import pytest
import torch
from torch import nn

from stoker.batch.counted import Limits, count


def test_a_product_by_hand() -> None:
    """(4, 8) @ (8, 16): 2 x 4 x 8 x 16 FLOPs; reads 4 x 8 + 8 x 16 numbers, writes 4 x 16."""
    left, right = torch.ones(4, 8), torch.ones(8, 16)
    found = count(lambda: left.mm(right) is None)
    assert found.flops == 1024
    assert found.moved == (32 + 128 + 64) * 4
    assert found.dtype == torch.float32
    assert found.flop_per_byte == pytest.approx(1024 / 896)


def test_views_move_nothing_and_expanded_tensors_are_no_larger_than_their_storage() -> None:
    one = torch.ones(1, 8)
    assert count(lambda: one.view(8).expand(100, 8) is None).moved == 0
    assert count(lambda: one.expand(100, 8).sum() is None).moved == 8 * 4 + 4


def test_a_lookup_reads_the_rows_it_returns() -> None:
    table = nn.Embedding(1000, 8)
    rows = torch.tensor([1, 2, 3])
    with torch.no_grad():
        assert count(lambda: table(rows) is None).moved == 2 * 3 * 8 * 4


def test_the_dtype_of_most_products() -> None:
    a, b = torch.ones(4, 4), torch.ones(64, 64, dtype=torch.bfloat16)

    def step() -> None:
        a.mm(a)
        b.mm(b)

    assert count(step).dtype == torch.bfloat16


def test_a_training_step_is_three_forward_passes() -> None:
    model, x = nn.Linear(8, 16, bias=False), torch.ones(4, 8, requires_grad=True)
    found = count(lambda: model(x).sum().backward())
    assert found.flops == 3 * 2 * 4 * 8 * 16


def test_nothing_counted() -> None:
    found = count(lambda: None)
    assert (found.flops, found.moved, found.flop_per_byte) == (0, 0, 0.0)


def test_the_ridge() -> None:
    assert Limits(flops=2e12, bandwidth=1e11).ridge == 20


def test_sparse_gradients_are_counted() -> None:
    """Their storage can't be asked for, and the sweep of every sparse embedding ended there."""
    bag = torch.nn.EmbeddingBag(1000, 16, sparse=True)
    found = count(lambda: bag(torch.arange(6).reshape(2, 3)).sum().backward())
    assert found.moved >= 6 * 16 * 4
