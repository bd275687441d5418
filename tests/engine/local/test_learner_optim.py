"""The learning rate by samples, and the master optimizer against torch's own in fp32."""

import pytest
import torch
from torch import nn

from stoker.config.schema import Optimizer
from stoker.engine.local.optim import MasterOptimizer, _add, learning_rate


def test_learning_rate_by_hand() -> None:
    config = Optimizer(learning_rate=1.0, warmup_fraction=0.1, decay="linear", final_fraction=0.2)
    expected = {10: 0.1, 50: 0.5, 100: 1.0, 550: 0.6, 1000: 0.2, 2000: 0.2}
    assert {n: pytest.approx(learning_rate(config, n, 1000)) for n in expected} == expected


def test_cosine_and_constant() -> None:
    cosine = Optimizer(learning_rate=2.0, warmup_fraction=0.0, decay="cosine", final_fraction=0.0)
    assert [learning_rate(cosine, n, 100) for n in (0, 50, 100)] == pytest.approx([2.0, 1.0, 0.0])
    constant = Optimizer(learning_rate=2.0, warmup_fraction=0.0)
    assert {learning_rate(constant, n, 100) for n in (0, 50, 500)} == {2.0}


def test_all_warmup() -> None:
    assert learning_rate(Optimizer(learning_rate=1.0, warmup_fraction=1.0, decay="cosine"), 100, 100) == 1.0


def test_small_updates_survive_bfloat16_weights() -> None:
    """1e-4 on a weight of 1 is lost in bf16 (spacing 0.0078); the master adds 100 of them up."""
    module = nn.Linear(4, 4, bias=False).bfloat16()
    nn.init.ones_(module.weight)
    optimizer = MasterOptimizer(module, Optimizer(name="sgd", momentum=0.0, max_grad_norm=0.0))
    for _ in range(100):
        module(torch.ones(1, 4, dtype=torch.bfloat16)).sum().backward()
        optimizer.step(1e-4, optimizer.norm())
    torch.testing.assert_close(module.weight.float(), torch.full((4, 4), 0.99), atol=4e-3, rtol=0)


def test_first_small_updates_already_move_bfloat16_weights() -> None:
    """From exact masters as many weights cross a rounding step as should; from rounded ones none does."""
    exact = torch.rand(256, 256, generator=torch.Generator().manual_seed(0)) + 1  # bf16 spacing 0.0078
    moved = []
    for given in ({"weight": exact.clone()}, None):
        module = nn.Linear(256, 256, bias=False)
        module.weight.data = exact.bfloat16()
        optimizer = MasterOptimizer(module, Optimizer(name="sgd", momentum=0.0, max_grad_norm=0.0), given)
        assert torch.equal(module.weight, exact.bfloat16())
        module(torch.ones(1, 256, dtype=torch.bfloat16)).sum().backward()
        optimizer.step(4e-4, optimizer.norm())
        moved.append((module.weight.float() - exact.bfloat16().float()).mean().item())
    assert moved[0] == pytest.approx(-4e-4, rel=0.05)
    assert moved[1] == 0


@pytest.mark.parametrize("scale", [1.0, 4.0])
def test_gradients_add_up_as_pytorch_adds_them(scale: float) -> None:
    total, gradient = torch.randn(130, 7), torch.randn(130, 7).bfloat16()
    expected = total.clone().add_(gradient, alpha=1 / scale)
    _add(total, gradient, 1 / scale, compiled=True)
    assert torch.equal(total, expected)


def test_a_restart_keeps_masters_that_the_weights_are_roundings_of() -> None:
    exact = torch.rand(4, 4) + 1
    module = nn.Linear(4, 4, bias=False)
    module.weight.data = exact.bfloat16()
    optimizer = MasterOptimizer(module, Optimizer(), {"weight": exact.clone()})
    module.weight.data[0] = 3.0
    optimizer.restart()
    master = optimizer.tensors()["master/weight"]
    assert torch.equal(master[1:], exact[1:]) and (master[0] == 3).all()


@pytest.mark.parametrize("name", ["adamw", "sgd", "adafactor"])
def test_state_goes_through_tensors_and_back(name: str) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2).bfloat16())
    optimizer = MasterOptimizer(module, Optimizer(name=name))  # type: ignore[arg-type]
    (module[0](torch.randn(5, 4)).bfloat16() @ module[1].weight.T).float().square().sum().backward()
    optimizer.step(0.1, optimizer.norm())
    saved = {key: value.clone() for key, value in optimizer.tensors().items()}
    assert "master/1.weight" in saved
    assert "master/0.weight" not in saved
    other = MasterOptimizer(module, Optimizer(name=name))  # type: ignore[arg-type]
    other.load_tensors(saved)
    assert all(torch.equal(other.tensors()[key], value) for key, value in saved.items())


@pytest.mark.parametrize("before", ["adamw", "sgd", "adafactor"])
@pytest.mark.parametrize("after", ["adamw", "sgd", "adafactor"])
def test_moments_of_another_update_rule_begin_anew(before: str, after: str) -> None:
    module = nn.Linear(4, 3)

    def stepped(name: str, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        optimizer = MasterOptimizer(module, Optimizer(name=name))  # type: ignore[arg-type]
        optimizer.load_tensors(tensors)
        kept = optimizer.tensors()
        module(torch.ones(5, 4)).sum().backward()
        optimizer.step(0.1, optimizer.norm())
        assert kept == {} or before == after
        return optimizer.tensors()

    fresh = stepped(after, {})
    assert stepped(after, stepped(before, {})).keys() == fresh.keys()


def test_vectors_do_not_decay() -> None:
    module = nn.Linear(2, 2)
    nn.init.ones_(module.weight)
    nn.init.ones_(module.bias)
    optimizer = MasterOptimizer(module, Optimizer(weight_decay=0.5))
    optimizer.step(0.1, 0.0)
    torch.testing.assert_close(module.weight.detach(), torch.full((2, 2), 0.95))
    torch.testing.assert_close(module.bias.detach(), torch.ones(2))
