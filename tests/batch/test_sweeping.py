"""The whole sweep, on simulated devices with a clock of their own and on a small real model."""

import json
import math
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from bench.devices import KINDS, Device, draw, truth
from stoker.batch.counted import Limits
from stoker.batch.loading import LoaderOptions
from stoker.batch.sweeping import sweep
from stoker.batch.swept import Sweep
from stoker.batch.target import Maker, Target
from stoker.batch.timing import Effort
from stoker.errors import ConfigError, StokerError

QUICK = Effort(repeats=3, seconds=0.01, passes=2)


def swept(device: Device, **options: Any) -> Sweep:
    return sweep(device, largest=device.largest, instruments=device.instruments(), **{"remedies": False} | options)


@pytest.mark.parametrize("kind", KINDS)
def test_knee_and_verdict_of_each_kind_of_device(kind: str) -> None:
    device = draw(kind, seed=77_777)
    found = swept(device, loader=device.options)
    true = truth(device, found.studied)
    assert found.verdict.kind == true.verdict
    assert found.knee is not None
    if true.knee is None:
        assert found.knee.size is None
    else:
        assert found.knee.size is not None
        assert abs(math.log2(found.knee.size / true.knee)) <= 0.5


def test_by_default_it_doubles_until_nothing_is_gained() -> None:
    device = Device("saturating", alpha=0.01, beta=0.001, jitter=0.002)
    found = sweep(device, remedies=False, instruments=device.instruments())
    sizes = [point.size for point in found.points]
    assert {1, 2, 4, 8, 16, 32, 64, 128, 256} <= set(sizes) <= set(range(513))  # a knee at 45, then three doublings
    assert "3 doublings in a row gained less than 10%" in found.stopped
    assert found.knee is not None
    assert found.knee.agree
    assert found.knee.size == pytest.approx(45, rel=0.15)
    assert found.recommended is not None
    assert 32 <= found.recommended <= 64
    assert found.operating == (found.recommended, sizes[-1])
    assert found.points[0].zone == "steep"
    assert found.points[-1].zone == "flat"


def test_what_is_left_is_told_with_every_part() -> None:
    """By the simulated clock: unknown while sizes double without an end, then within a third of the whole."""
    device = Device("saturating", alpha=0.01, beta=0.001, jitter=0.001)
    told: list[tuple[float, str, float | None]] = []
    sweep(device, instruments=device.instruments(), on_part=lambda what, left: told.append((device.now, what, left)))
    assert told[0][1] == "1: 10.99 ms/step, 91/s"
    known = [(device.now - at, left) for at, _, left in told if left is not None]
    assert len(known) > len(told) / 2
    assert all(abs(left - really) < device.now / 3 for really, left in known)
    assert known[-1][1] == 0
    bounded: list[float | None] = []
    sweep(device, [4, 8], instruments=device.instruments(), on_part=lambda _, left: bounded.append(left))
    assert None not in bounded
    assert bounded[0] > bounded[-1]


def test_the_loader_and_remedies_are_parts_too() -> None:
    device = draw("data-bound", seed=77_777)
    told: list[str] = []
    swept(device, loader=device.options, remedies=True, on_part=lambda what, left: told.append(what))
    assert any("with the loader: " in what and what.endswith("% of a step waits") for what in told)
    assert any(what.startswith("workers, ") for what in told)


def test_memory_ends_it_and_the_estimate_is_of_the_growth() -> None:
    """1 GiB held, 1 MiB each, 1.1 GiB in all: 102 fit; with a tenth left free none of these could."""
    device = Device("memory-limited", 0.1, 0.0005, jitter=0.002, capacity=int(1.1 * (1 << 30)))
    found = swept(device)
    assert found.points[-1].size == 64
    assert found.verdict.kind == "memory-limited"
    assert "128 ran out of memory (simulated" in found.stopped
    assert found.points[-1].peak_bytes == (1 << 30) + 64 * (1 << 20)
    assert found.memory_allows == pytest.approx((0.9 * 1.1 - 1) * 1024, abs=1)


def test_where_running_out_would_end_the_process_the_growth_of_two_peaks_decides() -> None:
    device = Device("memory-limited", 0.1, 0.0005, jitter=0.002, capacity=2 << 30)
    read = device.instruments()
    careful = type(read)(**{**vars(read), "survives": False})
    found = sweep(device, largest=4096, remedies=False, instruments=careful)
    assert found.points[-1].size == 512  # 1.5 GiB of 2; 1024 would be all of it
    assert "1,024 would need more than the 2.1 GB there are" in found.stopped


def test_heat_is_told() -> None:
    device = Device("throttled", 0.02, 0.001, jitter=0.002, slowdown=1.4, cool=2.0, heating=1.0)
    found = swept(device)
    assert found.drift == pytest.approx(0.4, abs=0.15)
    assert any("% longer while the device was measured" in warning for warning in found.warnings)
    assert found.knee is not None
    assert found.knee.size == pytest.approx(90, rel=0.2)


def test_a_device_that_becomes_faster_is_said_to() -> None:
    """It was "steps became -20% longer"."""
    device = Device("throttled", 0.02, 0.001, jitter=0.002, slowdown=0.7, cool=2.0, heating=1.0)
    found = swept(device)
    assert found.drift == pytest.approx(-0.3, abs=0.15)
    assert any(f"became {-found.drift:.0%} shorter while" in warning for warning in found.warnings)


def test_a_size_that_fills_tiles_badly_is_told_and_not_recommended() -> None:
    device = Device("tile-quantised", 0.05, 0.001, jitter=0.001, tile=64)
    found = swept(device)
    bad = [warning for warning in found.warnings if "fills tiles badly" in warning]
    assert bad
    assert found.recommended is not None
    assert found.recommended % 64 == 0


def test_remedies_of_a_slow_loader_are_predicted_and_measured() -> None:
    device = Device("data-bound", 0.02, 0.001, jitter=0.005, fetch=0.003, largest=256)
    found = swept(device, present=32, loader=LoaderOptions(), remedies=True)
    data = found.at(32).data
    assert data is not None
    assert data.waited == pytest.approx(0.096 / 0.148, abs=0.02)
    assert data.by_rerun == pytest.approx(data.waited, abs=0.02)
    assert found.verdict.kind == "data-bound"
    assert found.studied == 32
    remedies = {remedy.name: remedy for remedy in found.remedies}
    workers = remedies["workers"]
    assert workers.loading is not None
    assert workers.loading.workers in (2, 3)  # 96 ms a batch over 52 ms a step
    assert workers.predicted is not None
    assert workers.measured == pytest.approx(workers.predicted, rel=0.1)
    assert remedies["pin_memory"].note == "nothing to copy faster"
    assert remedies["larger batch"].measured == pytest.approx(remedies["larger batch"].predicted, rel=0.2)


def test_a_loader_that_keeps_up_needs_nothing() -> None:
    device = Device("saturating", 0.02, 0.001, fetch=1e-6, largest=256)
    found = swept(device, loader=LoaderOptions(), remedies=True)
    assert [remedy.note for remedy in found.remedies if remedy.name == "workers"] == ["not needed"]


def test_json_is_plain_and_text_says_it_all() -> None:
    device = Device("data-bound", 0.02, 0.001, fetch=0.003, largest=256)
    found = swept(device, present=32, loader=LoaderOptions(), remedies=True, scenario="classification")
    data = json.loads(json.dumps(found.to_json(), allow_nan=False))
    assert data["points"][0]["size"] == 1
    assert data["fit"]["beta"] == pytest.approx(0.001, rel=0.1)
    assert data["remedies"][0]["measured"] == found.remedies[0].measured
    text = str(found)
    for part in (
        "Data-bound",
        "examples/s",
        "waits for data",
        "knee (a doubling",
        "remedies at 32",
        "raise the batch?",
    ):
        assert part in text


def test_a_usual_size_is_no_warning_and_a_far_one_is() -> None:
    device = Device("saturating", 0.02, 0.001, largest=256)
    assert not any("usual" in warning for warning in swept(device, present=64, scenario="classification").warnings)
    assert any(
        "below the 64 to 256" in warning for warning in swept(device, present=8, scenario="classification").warnings
    )


def test_errors() -> None:
    device = Device("saturating", 0.02, 0.001)
    with pytest.raises(ConfigError, match="scenario 'x' is not known"):
        swept(device, scenario="x")
    with pytest.raises(ConfigError, match="sizes must be 1 or more"):
        sweep(device, [0, 4], instruments=device.instruments())
    device.capacity = device.held_bytes + 1
    with pytest.raises(ConfigError, match="only 0 size ran"):
        swept(device)


class Broken(Device):
    def step_on(self, batch: int) -> None:
        raise RuntimeError("shapes don't match")


def test_an_error_that_is_not_memorys_passes_through() -> None:
    device = Broken("saturating", 0.02, 0.001)
    with pytest.raises(RuntimeError, match="shapes don't match"):
        swept(device)


def make_target(most: str = "64") -> Target:
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))
    data = TensorDataset(torch.randn(int(most), 16), torch.arange(int(most)) % 4)

    def loss(module: nn.Module, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(module(batch[0]), batch[1])

    def load(size: int, options: LoaderOptions) -> DataLoader[Any]:
        return DataLoader(data, size, drop_last=True, **options.keywords())

    return Target(
        model,
        torch.optim.AdamW(model.parameters()),
        make_batch=lambda size: (torch.randn(size, 16), torch.arange(size) % 4),
        loss=loss,
        most=int(most),
        load=load,
    )


def test_a_real_model_with_a_real_loader(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stoker.batch.sweeping.limits", lambda *_: Limits(1e11, 1e10))
    found = sweep(Maker(f"{Path(__file__)}:make_target", ("48",)), effort=QUICK)
    assert found.points[-1].size == 48
    assert found.points[0].flops == 3 * 2 * (16 * 64 + 64 * 4) - 2 * 16 * 64  # the inputs need no gradient
    assert found.roofline is not None
    assert found.roofline.dtype == "float32"
    assert all(point.share_of_peak and point.flop_per_byte for point in found.points)
    assert found.at(48).data is not None
    assert found.at(48).data.steps_per_epoch == 1
    assert found.loading == LoaderOptions()
    json.dumps(found.to_json(), allow_nan=False)


def test_a_target_that_lives_is_left_as_it_was() -> None:
    target = make_target()
    before = [weight.detach().clone() for weight in target.model.parameters()]
    sweep(target, [1, 2, 4], effort=QUICK, remedies=False, roofline=False)
    assert all(torch.equal(a, b) for a, b in zip(before, target.model.parameters(), strict=True))
    assert not target.optimizer.state
    assert all(weight.grad is None for weight in target.model.parameters())


def test_a_workload_that_only_steps() -> None:
    class Sleeper:
        unit, most, device = "tokens", 8, torch.device("cpu")

        def step(self, size: int) -> None:
            time.sleep(1e-4)

    found = sweep(Sleeper(), effort=QUICK)
    assert [point.size for point in found.points][:4] == [1, 2, 4, 8]
    assert found.loading is None
    assert found.roofline is None
    assert found.remedies == ()


@pytest.mark.parametrize(("there", "words"), [(32, "make_batch gave 96 numbers for 2"), (5, "fewer than 8 examples")])
def test_a_batch_maker_that_does_not_give_the_size_is_no_sweep(there: int, words: str) -> None:
    """Throughput was said of sizes that never ran: a maker that stops at what it has let it rise without end."""
    model = torch.nn.Linear(3, 1)
    rows = torch.randn(there, 3)
    target = Target(
        model,
        torch.optim.SGD(model.parameters()),
        lambda size: rows if there == 32 else rows[:size],
        lambda model, batch: model(batch).mean(),
    )
    with pytest.raises(StokerError, match=words):
        sweep(target, [1, 2, 4, 8], remedies=False, roofline=False, effort=Effort(repeats=2, seconds=0.01, passes=2))
