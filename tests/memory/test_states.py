"""Bytes a parameter by set-up, the published cases, and the sizes that real optimizers keep."""

import pytest
import torch
from torch import nn

from stoker.errors import ConfigError
from stoker.memory.setup import Setup
from stoker.memory.shape import Weights
from stoker.memory.states import States, deepspeed_estimate, states_of

GB = 1e9


def weights(parameters: int, linear: int = 0, trained: int | None = None, **more: int) -> Weights:
    whole = parameters if trained is None else trained
    rest = dict.fromkeys(("largest", "table", "input_tables", "head_table", "layer", "factored"), 0)
    return Weights(parameters, linear, whole, **rest | more)


def states(parameters: int, linear: int = 0, trained: int | None = None, **setup: object) -> States:
    return states_of(weights(parameters, linear, trained), Setup(1, 1, **setup))  # type: ignore[arg-type]


def total(found: States) -> float:
    return found.weights + found.gradients + found.optimizer


@pytest.mark.parametrize(
    ("precision", "optimizer", "expected"),
    [
        ("fp32", "adamw", 16),
        ("autocast", "adamw", 16),
        ("master", "adamw", 16),
        ("master, fp32 gradients", "adamw", 18),
        ("bf16", "adamw", 8),
        ("fp32", "adamw_8bit", 8 + 2.03125),
        ("fp32", "sgd", 8),
        ("fp32", "sgd_momentum", 12),
        ("bf16", "sgd_momentum", 6),
        ("fp32", "muon", 12),  # all of it in the layers' matrices
        ("bf16", "muon", 6),
    ],
)
def test_bytes_a_parameter(precision: str, optimizer: str, expected: float) -> None:
    assert total(states(1000, 1000, precision=precision, optimizer=optimizer)) == 1000 * expected


def test_muon_moves_the_rest_with_adamw() -> None:
    assert states(1000, 600, optimizer="muon").optimizer == 4 * (600 + 2 * 400)


def test_a_model_that_only_scores_has_weights_alone() -> None:
    found = states(1000, precision="bf16", optimizer="none")
    assert (found.weights, total(found)) == (2000, 2000)


@pytest.mark.parametrize(("base", "expected"), [(None, 2), ("int8", 1), ("nf4", 0.5625), ("nf4_double", 0.5159)])
def test_lora_beside_a_frozen_base(base: str | None, expected: float) -> None:
    found = states(1_000_000, 900_000, 10_000, precision="bf16", lora_rank=8, quantised=base)
    assert found.weights == pytest.approx(900_000 * expected + 100_000 * 2 + 10_000 * 4, rel=1e-4)
    assert found.gradients + found.optimizer == 12 * 10_000


@pytest.mark.parametrize(
    ("stage", "expected"), [("none", 16), ("zero1", 4 + 12 / 8), ("zero2", 2 + 14 / 8), ("zero3", 16 / 8)]
)
def test_shares_of_a_rank(stage: str, expected: float) -> None:
    """ZeRO, arXiv 1910.02054, figure 1: 2 + 2 + 12 bytes, of which 8 ranks share the last, the last two, all."""
    ranks = 1 if stage == "none" else 8
    found = states(1000, precision="master", sharding=stage, ranks=ranks)
    assert total(found) == 1000 * expected


def test_what_a_step_makes_and_drops() -> None:
    some = weights(1000, largest=300)
    for stepping, expected in (("loop", 2 * 300 * 4), ("foreach", 4 * 1000), ("fused", 0)):
        assert states_of(some, Setup(1, 1, stepping=stepping)).stepping == expected  # type: ignore[arg-type]
    assert states_of(some, Setup(1, 1, optimizer="sgd")).stepping == 0
    assert states_of(some, Setup(1, 1, stepping="in backward")).gradients == 300 * 4


def test_zero_check_case() -> None:
    """ZeRO, arXiv 1910.02054, section 3.1: 1.5 B parameters 24 GB; 7 B by the same rule 112 GB."""
    assert total(states(1_500_000_000, precision="master")) == 24 * GB
    found = states(7_000_000_000, precision="master")
    assert (found.weights, found.gradients, found.optimizer) == (14 * GB, 14 * GB, (56 + 28) * GB)
    assert total(found) == 112 * GB


def test_thirty_billion_parameters() -> None:
    """60 GB in 16 bit, 30 in 8, 15 in 4 (without scales); training adds 60 GB of gradients, 360 of fp32 states."""
    n = 30_000_000_000
    for base, expected in ((None, 60), ("int8", 30), ("nf4_double", 15.48)):
        found = states(n, n, precision="bf16", optimizer="none", quantised=base)
        assert found.weights == pytest.approx(expected * GB, rel=1e-3)
    trained = states(n, precision="master")
    assert (trained.gradients, trained.optimizer) == (60 * GB, 360 * GB)


def test_deepspeed_counts_by_its_own_formula() -> None:
    """Its documentation's example: 2,851 M parameters (largest layer 32 M), 8 devices: 15.93 and 6.10 GiB."""
    assert deepspeed_estimate(2_851_000_000, 8, 2) / 2**30 == pytest.approx(15.93, abs=0.005)
    assert deepspeed_estimate(2_851_000_000, 8, 3, 32_000_000) / 2**30 == pytest.approx(6.10, abs=0.01)
    with pytest.raises(ValueError, match="stage 1"):
        deepspeed_estimate(1, 1, 1)


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("adamw", torch.optim.AdamW),
        ("sgd", torch.optim.SGD),
        ("sgd_momentum", lambda weights: torch.optim.SGD(weights, momentum=0.9)),
        ("muon", torch.optim.Muon),
        ("adafactor", torch.optim.Adafactor),
    ],
)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_real_optimizers_keep_what_is_said(name: str, make: type[torch.optim.Optimizer], precision: str) -> None:
    layer = nn.Linear(24, 40, bias=False, dtype=torch.bfloat16 if precision == "bf16" else None)
    optimizer = make(layer.parameters())
    layer(torch.randn(2, 24, dtype=layer.weight.dtype)).sum().backward()
    optimizer.step()
    kept = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, torch.Tensor)]
    one = weights(960, 960, factored=24 + 40)
    expected = states_of(one, Setup(1, 1, precision=precision, optimizer=name)).optimizer
    assert sum(value.nbytes for value in kept if value.numel() > 1) == expected


def test_names_that_are_not_known_and_numbers_that_clash() -> None:
    for change, message in (
        ({"optimizer": "adam"}, "optimizer = 'adam' isn't one of adamw"),
        ({"precision": "fp8"}, "precision"),
        ({"loss": "mse"}, "loss"),
        ({"quantised": "nf4"}, "aren't trained"),
        ({"quantised": "nf3", "lora_rank": 1}, "nf3"),
        ({"sharding": "zero2"}, "ranks above 1"),
        ({"ranks": 0}, "ranks = 0"),
        ({"lora_rank": -1}, "negative"),
        ({"accumulating": True, "stepping": "in backward"}, "no gradients"),
    ):
        with pytest.raises(ConfigError, match=message):
            Setup(1, 1, **change)  # type: ignore[arg-type]
