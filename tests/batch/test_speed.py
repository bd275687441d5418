"""Measured limits: the arithmetic with a clock of our own, and that measuring leaves no trace."""

from typing import Any

import pytest
import torch

from stoker.batch import speed

CPU = torch.device("cpu")


def test_rates_are_work_over_the_best_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "_best_seconds", lambda work, device, seconds: work() is None or 0.5)
    assert speed.matmul_rate(3, 4, 5, CPU, torch.float32) == 2 * 3 * 4 * 5 / 0.5
    assert speed.copy_bandwidth(CPU, size=1000) == 2 * 1000 / 0.5  # read and written


def test_the_best_of_several_rounds_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    rounds = iter([9.0, 3.0, 0.2, 0.5, *[1.0] * 1_000_000])
    monkeypatch.setattr(speed, "_timed", lambda work, device, calls: next(rounds))
    assert speed._best_seconds(lambda: None, CPU, seconds=0.01) == 0.2


def test_the_peak_is_the_fastest_size_and_larger_ones_stop_when_they_take_long(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def rate(m: int, k: int, n: int, *rest: Any) -> float:
        tried.append(m)
        return {512: 1e9, 1024: 3e11, 2048: 1e11}[m]

    monkeypatch.setattr(speed, "SIDES", (1024, 2048, 4096))
    monkeypatch.setattr(speed, "matmul_rate", rate)
    assert speed.matmul_peak(CPU, torch.float32) == 3e11
    assert tried == [1024, 2048]  # the second took 0.17 s


def test_measuring_leaves_the_generator_alone() -> None:
    before = torch.get_rng_state()
    assert speed.matmul_rate(64, 64, 64, CPU, torch.float32, seconds=0.01) > 0
    assert speed.copy_bandwidth(CPU, seconds=0.01, size=1 << 16) > 0
    assert torch.equal(torch.get_rng_state(), before)
