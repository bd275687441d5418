"""Measuring gradients; expected values by hand."""

import pytest
import torch
from torch import nn

from stoker.batch.gradients import FURTHEST, Gap, combined, expected_draws, fit_weights, gaps, on_copies, worst


def grads(**values: list[float]) -> dict[str, torch.Tensor]:
    return {name: torch.tensor(value, dtype=torch.float64) for name, value in values.items()}


def test_gaps_are_relative_to_the_parameters_largest_gradient() -> None:
    found = gaps(grads(a=[1.0, 2.2], b=[10.0]), grads(a=[1.0, 2.0], b=[11.0]))
    assert found == (Gap("a", pytest.approx(0.2), pytest.approx(0.1)), Gap("b", 1.0, pytest.approx(1 / 11)))


def test_a_gradient_of_rounding_only_is_held_against_a_thousandth_of_the_largest() -> None:
    assert worst(grads(a=[1.0], b=[2e-17]), grads(a=[1.0], b=[1e-17])) == pytest.approx(1e-14)


def test_one_side_only_counts_as_zero_and_nan_is_furthest() -> None:
    assert gaps(grads(), grads(a=[4.0])) == (Gap("a", 4.0, 1.0),)
    assert gaps(grads(a=[0.0], b=[1.0]), grads(a=[1.0]))[0] == Gap("b", 1.0, 1000.0)
    assert gaps(grads(a=[float("nan")]), grads(a=[1.0])) == (Gap("a", FURTHEST, FURTHEST),)


def test_weights_come_back_from_their_sum() -> None:
    parts = [grads(a=[1.0, 2.0, 0.5], b=[3.0]), grads(a=[0.0, 1.0, 1.0]), grads(a=[1.0, 1.0, 4.0], b=[-1.0])]
    assert fit_weights(parts, combined(parts, [0.5, 0.3, -2.0])) == pytest.approx([0.5, 0.3, -2.0], abs=1e-14)
    assert combined([grads(a=[float("nan")]), grads(a=[1.0])], [0.0, 2.0])["a"].item() == 2


def test_draws_are_their_expectation_and_their_places_are_told() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.25), nn.Dropout(0.0), nn.AlphaDropout(0.5))
    x = torch.randn(5, 3)
    with expected_draws(model) as places:
        assert model(x).shape == (5, 4) and torch.allclose(model[:3](x), model[0](x))
        assert torch.equal(torch.rand(3), torch.full((3,), 0.5))
        assert torch.equal(torch.randn(3), torch.zeros(3))
        assert torch.equal(torch.empty(2).uniform_(2, 4), torch.full((2,), 3.0))
        assert torch.equal(torch.bernoulli(torch.tensor([0.2])), torch.tensor([0.2]))
        assert torch.equal(torch.empty(1).exponential_(2.0), torch.tensor([0.5]))
    assert places == ["1", "3", "the loss"]
    assert not torch.equal(torch.rand(3), torch.rand(3))


def test_copies_leave_the_storage_alone() -> None:
    model = nn.BatchNorm1d(2)
    weight, mean = model.weight.data, model.running_mean
    with on_copies(model, torch.float64):
        assert model.weight.dtype == model.running_mean.dtype == torch.float64
        model.weight.data.zero_()
        model(torch.ones(3, 2, dtype=torch.float64))
    assert model.weight.data_ptr() == weight.data_ptr() and model.weight.tolist() == [1, 1]
    assert model.running_mean is mean and mean.tolist() == [0, 0]


def test_a_gap_in_an_imaginary_part_is_one() -> None:
    """It was cast to a real number, and gone."""
    whole = {"w": torch.tensor([1 + 1j])}
    (gap,) = gaps({"w": torch.tensor([1 + 2j])}, whole)
    assert gap.absolute == pytest.approx(1.0)
    parts = [{"w": torch.tensor([1 + 0j])}, {"w": torch.tensor([0 + 1j])}]
    assert fit_weights(parts, {"w": torch.tensor([3 + 2j])}) == pytest.approx([3.0, 2.0])


def test_complex_parameters_compute_in_the_double_of_theirs() -> None:
    model = nn.Module()
    model.weight = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    with on_copies(model, torch.float64):
        assert model.weight.dtype == torch.complex128
    assert model.weight.dtype == torch.complex64
