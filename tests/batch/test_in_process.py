"""Trials in this process, and that nothing of them stays."""

import copy
import gc
import random
import sys
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from stoker.batch.in_process import InProcess, unchanged
from stoker.batch.target import Target
from stoker.errors import RunError


class Net(nn.Module):
    """Everything that a step may change: buffers, dropout, a counter, a frozen part in eval mode."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1))
        self.frozen = nn.BatchNorm1d(1).eval()
        self.register_buffer("seen", torch.zeros(()), persistent=False)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen = self.seen + len(x)  # another tensor, not the same one changed
        return self.frozen(self.inner(x))


def target(fails_in_step: int | None = None, error: Callable[[], Exception] = MemoryError) -> Target:
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    steps = 0

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        nonlocal steps
        steps += 1
        model.train()  # a loop's own habit
        random.random(), np.random.rand()
        for group in optimizer.param_groups:
            group["lr"] *= 0.5  # a scheduler within the step
        result = model(x).square().mean()
        if steps == fails_in_step:
            raise error()
        return result

    return Target(model, optimizer, lambda size: torch.randn(size, 4), loss, most=64)


def everything(target: Target) -> dict[str, Any]:
    """All of it, as values."""
    model, optimizer = target.model, target.optimizer
    return copy.deepcopy(
        {
            "weights": {name: tensor.tolist() for name, tensor in model.named_parameters()},
            "buffers": {name: tensor.tolist() for name, tensor in model.named_buffers()},
            "gradients": [None if p.grad is None else p.grad.tolist() for p in model.parameters()],
            "modes": [module.training for module in model.modules()],
            "plain": model.calls,
            "states": [
                {key: value.tolist() if isinstance(value, Tensor) else value for key, value in state.items()}
                for state in optimizer.state.values()
            ],
            "rates": [group["lr"] for group in optimizer.param_groups],
            "random": (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()),
        }
    )


@pytest.mark.parametrize("trained", [False, True], ids=["no state yet", "trained before"])
@pytest.mark.parametrize("fails_in_step", [None, 1, 2], ids=["runs", "fails at once", "fails with states"])
def test_peer_fault_25_nothing_of_a_trial_stays(trained: bool, fails_in_step: int | None) -> None:
    made = target(None if fails_in_step is None else fails_in_step + trained)
    made.model.inner[2].eval()
    if trained:
        made.step(8)
        made.model.inner[2].eval()
        made.model.frozen.eval()
        next(made.model.parameters()).grad = None  # one without, the others with
    before = everything(made)
    objects = [(id(p), None if p.grad is None else id(p.grad)) for p in made.model.parameters()]
    ending = InProcess(made, 2, None).try_size(8, None)
    assert ending.end == ("ran" if fails_in_step is None else "out of memory")
    assert everything(made) == before
    assert [(id(p), None if p.grad is None else id(p.grad)) for p in made.model.parameters()] == objects
    assert len(made.optimizer.state) == (0 if not trained else len(objects))


def test_peer_fault_25_the_model_is_not_left_in_train_mode() -> None:
    made = target()
    made.model.eval()
    InProcess(made, 2, None).try_size(8, None)
    assert [module.training for module in made.model.modules()] == [False] * len(list(made.model.modules()))


def test_peer_fault_25_restored_where_another_error_comes() -> None:
    made = target(2, lambda: RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    before = everything(made)
    with pytest.raises(RunError, match="not for memory.*\n.*Traceback"):
        InProcess(made, 2, None).try_size(8, None)
    assert everything(made) == before


def test_training_goes_on_as_if_there_had_been_no_trial() -> None:
    tried, plain = target(), target()
    torch.manual_seed(1)
    tried.step(8)
    InProcess(tried, 3, None).try_size(32, None)
    tried.step(8)
    torch.manual_seed(1)
    plain.step(8)
    plain.step(8)
    for mine, other in zip(tried.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(mine, other)


def test_peer_fault_25_no_exception_pins_tensors() -> None:
    """Without a collection by hand: what the failing step held is gone when the trial returns."""
    pinned: list[weakref.ref[Tensor]] = []
    made = target()

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        hidden = model(x)
        pinned.append(weakref.ref(hidden))
        raise MemoryError

    made.loss = loss
    gc.disable()
    try:
        ending = InProcess(made, 2, None)._tried(8, None, 2)
        assert ending["end"] == "out of memory"
        assert pinned[0]() is None
        assert sys.exc_info() == (None, None, None)
    finally:
        gc.enable()


@pytest.mark.skipif(sys.platform != "linux", reason="address space is limited on Linux")
def test_a_real_lack_of_memory_in_process() -> None:
    made = target()
    made.make_batch = lambda size: torch.zeros(size, 4)
    made.most = None
    in_process = InProcess(made, 2, None)
    assert in_process.try_size(64, 256 * 2**20).end == "ran"
    assert in_process.try_size(2**26, 256 * 2**20).end == "out of memory"


def test_peer_fault_25_short_samples_are_refused() -> None:
    made = target()
    with pytest.raises(RunError, match=r"none of the longest length, 4096") as caught:
        InProcess(made, 2, 4096).try_size(8, None)
    assert "stoker.batch.longest" in str(caught.value)
    assert InProcess(made, 2, 4).try_size(8, None).told["batch"] == ("8 x 4 float32",)


def test_peer_fault_25_a_batch_with_fewer_examples_than_asked_for_is_refused() -> None:
    made = target()
    make = made.make_batch
    made.make_batch = lambda size: make(min(size, 6))
    with pytest.raises(RunError, match="fewer than 8 examples"):
        InProcess(made, 2, None).try_size(8, None)


def test_peer_fault_25_zero_updates_run_is_no_success() -> None:
    made = target()
    made.optimizer.step = lambda *_: None
    with pytest.raises(RunError, match="step 1 of 8 examples made no optimizer update: nothing was tried"):
        InProcess(made, 2, None).try_size(8, None)


def test_larger_than_the_data_set_is_refused() -> None:
    with pytest.raises(RunError, match="65 examples is larger than the data set, which has 64"):
        InProcess(target(), 2, None).try_size(65, None)


@pytest.mark.parametrize("swept", [True, False])
def test_tensor_learning_rates_keep_their_place(swept: bool) -> None:
    """As a captured graph needs them."""
    made = target()
    rate = torch.tensor(0.1)
    made.optimizer.param_groups[0]["lr"] = rate
    with unchanged(made, swept=swept):
        rate.mul_(0.5)
        made.optimizer.param_groups[0]["lr"] = 3.0
    assert made.optimizer.param_groups[0]["lr"] is rate
    assert rate.item() == pytest.approx(0.1)


def test_one_step_is_refused() -> None:
    from stoker.batch.limits import Meter
    from stoker.batch.rehearsal import rehearse

    with pytest.raises(ValueError, match="first held in the second"):
        rehearse(target(), 8, 1, Meter(fresh=False), None, lambda _: None)


def test_the_batch_maker_is_the_users_own_again() -> None:
    made = target()
    make, hooks = made.make_batch, len(made.optimizer._optimizer_step_post_hooks)
    InProcess(made, 2, None).try_size(8, None)
    assert made.make_batch is make
    assert len(made.optimizer._optimizer_step_post_hooks) == hooks
    with pytest.raises(RunError):
        InProcess(made, 2, 4096).try_size(8, None)
    assert made.make_batch is make


def test_looking_at_the_layers_leaves_no_trace_either() -> None:
    """The forward passes of the inspection were counted by a module that counts."""
    made = target()
    InProcess(made, 2, None).inspect()
    assert made.model.calls == 0
    assert made.model.training


def test_what_is_trained_beside_the_model_is_put_back_too() -> None:
    centres = nn.Parameter(torch.ones(3))
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD([*model.parameters(), centres], lr=0.1)
    made = Target(
        model, optimizer, lambda size: torch.randn(size, 4), lambda model, x: (model(x) - centres).square().mean()
    )
    assert InProcess(made, 2, None).try_size(4, None).end == "ran"
    assert torch.equal(centres, torch.ones(3))
    assert centres.grad is None


def test_sparse_gradients_are_counted() -> None:
    """Their `nbytes` raises, and so did the fit of every sparse embedding."""
    model = nn.EmbeddingBag(1000, 16, sparse=True)
    made = Target(
        model,
        torch.optim.SparseAdam(model.parameters()),
        lambda size: torch.arange(size * 3).reshape(size, 3),
        lambda model, x: model(x).square().mean(),
    )
    ending = InProcess(made, 2, None).try_size(4, None)
    assert ending.told["parts"]["gradients"] == 12 * 16 * 4 + 12 * 8  # twelve rows and their places
    assert ending.told["parts"]["states"] == 2 * model.weight.nbytes


def test_a_scripted_module_is_tried_without_a_look_at_its_layers() -> None:
    with pytest.warns(DeprecationWarning, match="script"):
        model = torch.jit.script(nn.Linear(4, 1))
    made = Target(
        model,
        torch.optim.SGD(model.parameters()),
        lambda size: torch.randn(size, 4),
        lambda model, x: model(x).square().mean(),
    )
    trials = InProcess(made, 2, None)
    assert "TorchScript module can't be looked into" in trials.inspect()["untraced"]
    assert trials.try_size(4, None).end == "ran"
