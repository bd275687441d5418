"""Each remedy with a loader whose truth is known; real workers in one."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from bench.devices import Device
from stoker.batch.curve import Fit
from stoker.batch.instruments import instruments_of
from stoker.batch.loading import LoaderOptions
from stoker.batch.remedies import At, compiled, larger_batch, loader_remedies, time_fetches
from stoker.batch.swept import Remedy
from stoker.batch.target import Target
from stoker.batch.timing import Effort, Loaded, time_steps

EFFORT = Effort(repeats=4, seconds=0.05)
PATIENT = Effort(repeats=4, seconds=3.0)


def at(device: Device, effort: Effort = EFFORT) -> At:
    size = 32
    read = device.instruments()
    return At(device, size, read, effort, time_steps(lambda: device.step(size), size, read, effort))


def remedies(device: Device, options: LoaderOptions, now: Loaded, effort: Effort = EFFORT) -> dict[str, Remedy]:
    return {remedy.name: remedy for remedy in loader_remedies(at(device, effort), options, now)}


def device(**more: Any) -> Device:
    return Device("data-bound", alpha=0.02, beta=0.001, jitter=0.0, **{"fetch": 0.003} | more)


def test_making_a_batch_is_timed_alone() -> None:
    found = time_fetches(at(device()))
    assert sum(found.seconds) / len(found.seconds) == pytest.approx(0.096, rel=0.2)
    assert found.cores == 16


def test_enough_workers_need_no_more() -> None:
    found = remedies(device(), LoaderOptions(8), Loaded(0.06, 0.008, 1.0, None))
    assert found["workers"].note == "enough of them"
    assert found["workers"].measured is None
    assert found["prefetch_factor"].change == "2 -> 8"


def test_options_that_are_on_are_left_on() -> None:
    found = remedies(device(), LoaderOptions(1, None, True, True), Loaded(0.1, 0.05, 1.0, 10))
    assert found["persistent_workers"].note == "on already"
    assert found["pin_memory"].note == "on already"


@dataclass
class Starting:
    """A loader whose workers take 2 s to start unless they persist."""

    owner: "Restarting"
    options: LoaderOptions
    started: bool = False

    def __len__(self) -> int:
        return 100

    def __iter__(self) -> Iterator[int]:
        if not (self.started and self.options.persistent_workers):
            self.owner.now += 2.0
        self.started = True
        for _ in range(100):
            self.owner.now += 0.1
            yield 32


@dataclass
class Restarting(Device):
    starts: list[LoaderOptions] = field(default_factory=list)

    def load(self, size: int, options: LoaderOptions) -> Starting:
        self.starts.append(options)
        return Starting(self, options)


def test_workers_that_persist_save_their_start_in_each_epoch() -> None:
    """2 s in 100 steps of 0.152 s."""
    slow = Restarting("data-bound", alpha=0.02, beta=0.001, jitter=0.0, fetch=1.0)
    found = remedies(slow, LoaderOptions(1), Loaded(0.152, 0.1, 2.1, 100), PATIENT)["persistent_workers"]
    assert found.predicted == pytest.approx(0.152 / (0.152 - 0.02) - 1, rel=0.02)
    assert found.measured == pytest.approx(found.predicted, rel=0.02)


def test_a_long_epoch_is_not_run_to_its_end() -> None:
    slow = Restarting("data-bound", alpha=0.02, beta=0.001, jitter=0.0, fetch=1.0)
    found = remedies(slow, LoaderOptions(1), Loaded(0.152, 0.1, 2.1, 10_000))["persistent_workers"]
    assert found.measured is None
    assert found.note == "an epoch takes 15 s, too long to be run to its end"  # 100 steps of 0.15 s


def test_a_small_wait_is_left() -> None:
    kept = remedies(device(fetch=1e-4), LoaderOptions(), Loaded(0.0552, 0.0022, 1.0, None))
    assert [remedy.note for remedy in kept.values()] == ["not needed"]


def test_a_larger_batch_is_predicted_by_the_other_points() -> None:
    line = Fit(alpha=0.1, beta=0.001)
    seconds = {size: line.seconds(size) for size in (16, 32, 64)} | {256: 0.4}
    found = larger_batch(64, 256, seconds)
    assert found.predicted == pytest.approx(line.rate(256) / line.rate(64) - 1)
    assert found.measured == pytest.approx(256 / 0.4 / (64 / 0.164) - 1)


def small(model: nn.Module) -> Target:
    data = TensorDataset(torch.randn(64, 8))

    def loss(module: nn.Module, batch: Any) -> Tensor:
        return module(batch[0]).square().mean()

    def load(size: int, options: LoaderOptions) -> DataLoader[Any]:
        return DataLoader(data, size, drop_last=True, **options.keywords())

    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return Target(model, optimizer, lambda size: (torch.randn(size, 8),), loss, load=load)


def test_a_model_that_cannot_be_compiled_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(nn.Linear):
        def forward(self, *_: Any) -> Any:
            raise RuntimeError("no compiler here\nand more")

    monkeypatch.setattr(torch, "compile", lambda model, mode: Broken(8, 8))
    target = small(nn.Linear(8, 8))
    line = Fit(alpha=0.001, beta=0.0001)
    found = compiled(target, 8, target.make_batch(8), 0.002, line, instruments_of(target.device), EFFORT)
    assert found.note == "can't be compiled: RuntimeError: no compiler here"
    assert found.measured is None
    assert found.predicted == pytest.approx(0.002 / 0.0008 - 1)


def test_a_compiled_model_is_timed_on_the_same_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(torch, "compile", lambda model, mode: seen.append(mode) or model)
    target = small(nn.Linear(8, 8))
    found = compiled(target, 8, target.make_batch(8), 0.002, Fit(0.001, 0.0), instruments_of(target.device), EFFORT)
    assert seen == ["default"]
    assert found.measured is not None
    assert found.predicted is None  # no cost per unit, so no bound


def test_real_workers() -> None:
    target = small(nn.Linear(8, 8))
    read = instruments_of(target.device)
    quick = Effort(repeats=3, seconds=0.01)
    held = time_steps(lambda: target.step(16), 16, read, quick)
    here = At(target, 16, read, quick, held)  # type: ignore[arg-type]
    options = LoaderOptions(1)
    found = list(loader_remedies(here, options, here.run(options)))
    assert {remedy.name for remedy in found} >= {"workers", "pin_memory"}
    assert all(remedy.before is not None for remedy in found)
