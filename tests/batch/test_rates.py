"""An optimizer's settings follow samples and batch."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from stoker.batch.changing import ChangingBatches
from stoker.batch.horizons import Horizon
from stoker.batch.rates import RateFollower, kind_of
from stoker.batch.stages import Ramp, Stages
from stoker.batch.warmup import WarmupWatch
from stoker.errors import ConfigError


def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2))]


def adamw(**keywords: object) -> torch.optim.AdamW:
    matrix, vector = parameters()
    groups = [{"params": [matrix]}, {"params": [vector], "lr": 0.5, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=0.1, betas=(0.9, 0.95), weight_decay=0.1, **keywords)  # type: ignore[arg-type]


def test_each_group_follows_from_its_own_peak() -> None:
    optimizer = adamw()
    rate = RateFollower(optimizer, Horizon(1000, 100, "linear"), 16)
    assert rate.set(50, 16) == pytest.approx(0.05)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.05, 0.25])
    assert rate.set(550, 64) == pytest.approx(0.1)  # half of the peak, twice for four times the batch
    first, second = optimizer.param_groups
    assert (first["lr"], second["lr"]) == pytest.approx((0.1, 0.5))
    assert first["betas"] == pytest.approx((0.9**4, 0.95**4))
    assert first["eps"] == pytest.approx(5e-9)
    assert (first["weight_decay"], second["weight_decay"]) == (pytest.approx(0.2), 0)
    rate.set(550, 16)
    assert first["betas"] == pytest.approx((0.9, 0.95)) and first["weight_decay"] == pytest.approx(0.1)


def test_the_rate_follows_at_every_switch() -> None:
    batches = ChangingBatches(30, Stages((8, 4), (0, 20), "samples"), granularity="step")
    optimizer = torch.optim.SGD(parameters(), lr=0.1)
    rate = RateFollower(optimizer, Horizon(1000, decay="constant"), 4)
    rates = [rate.set(batches.samples, batches.handed) for _ in batches.through(batches)]
    # 8 + 8 + 8, then 4 and the two that are left, each in proportion
    assert rates == pytest.approx([0.2, 0.2, 0.2, 0.1, 0.05])


def test_it_has_no_state_but_the_optimizers() -> None:
    before = adamw()
    horizon = Horizon(1000, 100)
    RateFollower(before, horizon, 16).set(500, 64)
    after = adamw()
    after.load_state_dict(copy.deepcopy(before.state_dict()))
    wanted = RateFollower(before, horizon, 16).set(700, 32)
    assert RateFollower(after, horizon, 16).set(700, 32) == wanted
    assert [g["initial_lr"] for g in after.param_groups] == [0.1, 0.5]
    made_first = RateFollower(fresh := adamw(), horizon, 16)
    fresh.load_state_dict(before.state_dict())
    assert made_first.set(700, 32) == wanted


def test_settings_in_tensors_are_set_in_place() -> None:
    held = torch.tensor(0.1)
    optimizer = torch.optim.AdamW(parameters(), lr=held)
    RateFollower(optimizer, Horizon(100, 10), 4).set(5, 4)
    assert optimizer.param_groups[0]["lr"] is held and float(held) == pytest.approx(0.05)


def test_adascale_takes_the_gain_of_each_step() -> None:
    optimizer = torch.optim.SGD(parameters(), lr=0.1)
    rate = RateFollower(optimizer, Horizon(100, decay="constant"), 4, rule="adascale")
    assert rate.set(8, 16, gain=2.5) == pytest.approx(0.25)
    with pytest.raises(ConfigError, match="needs the gain"):
        rate.set(8, 16)


def test_kinds_are_told_by_class() -> None:
    class Mine(torch.optim.AdamW):
        pass

    matrix = [nn.Parameter(torch.ones(2, 2))]
    made = [torch.optim.SGD(matrix), torch.optim.Adam(matrix), Mine(matrix), torch.optim.Muon(matrix)]
    assert [kind_of(each) for each in made] == ["sgd", "adam", "adamw", "muon"]
    assert kind_of(torch.optim.Adam(matrix, decoupled_weight_decay=True)) == "adamw"
    with pytest.raises(ConfigError, match="no rule is known for a Rprop: name one that it is like"):
        RateFollower(torch.optim.Rprop(matrix), Horizon(10), 4)
    assert RateFollower(torch.optim.Rprop(matrix), Horizon(10, decay="constant"), 4, kind="muon").set(5, 8) == 0.01


def test_muon_is_warned_of() -> None:
    (made,) = RateFollower(torch.optim.Muon([nn.Parameter(torch.ones(2, 2))]), Horizon(10), 4).rescaled(8)
    assert "no rule for Muon" in made.warnings[0]


class Run:
    """A training with everything in it: changing batches, workers that fetch ahead, rate, watch."""

    def __init__(self, workers: int) -> None:
        torch.manual_seed(0)
        inputs = torch.randn(60, 3)
        data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
        self.model = nn.Linear(3, 1)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        self.batches = ChangingBatches(60, Ramp(4, 16, over=90), granularity="step", seed=2)
        self.loader = DataLoader(data, batch_sampler=self.batches, num_workers=workers)
        self.rate = RateFollower(self.optimizer, Horizon(240, 20), 8)
        self.watch = WarmupWatch(20)
        self.parts = (self.model, self.optimizer, self.batches, self.watch)

    def train(self, updates: int) -> list[float]:
        losses = []
        while True:
            for inputs, wanted in self.batches.through(self.loader):
                self.optimizer.zero_grad()
                loss = (self.model(inputs) - wanted).square().mean()
                loss.backward()
                self.watch(
                    float(nn.utils.get_total_norm(p.grad for p in self.model.parameters())), self.batches.samples
                )
                self.rate.set(self.batches.samples, self.batches.handed)
                self.optimizer.step()
                losses.append(float(loss.detach()))
                if len(losses) == updates:
                    return losses


@pytest.mark.parametrize(("workers", "stop"), [(0, 3), (0, 9), (2, 5), (2, 12)])
def test_an_interrupted_training_is_the_uninterrupted_one(workers: int, stop: int) -> None:
    whole = Run(0).train(20)
    before = Run(workers)
    losses = before.train(stop)
    after = Run(workers)
    for new, old in zip(after.parts, before.parts, strict=True):
        new.load_state_dict(copy.deepcopy(old.state_dict()))
    assert losses + after.train(20 - stop) == whole
