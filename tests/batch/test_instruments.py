import sys

import psutil
import pytest
import torch

from stoker.batch import instruments
from stoker.batch.instruments import Instruments, instruments_of

CPU = torch.device("cpu")


def test_the_defaults_read_nothing() -> None:
    read = Instruments(clock=lambda: 1.0)
    read.synchronize()
    read.reset_peak()
    assert (read.clock(), read.peak(), read.utilisation(), read.capacity) == (1.0, None, None, None)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells")
def test_the_peak_of_resident_memory_starts_anew() -> None:
    read = instruments_of(CPU)
    held = [torch.ones(64 << 20, dtype=torch.uint8)]
    held.clear()
    before = read.peak()
    read.reset_peak()
    after = read.peak()
    if before is None or after is None:
        pytest.skip("this system doesn't let a process reset its high-water mark")
    assert before - after > 50 << 20
    held = [torch.ones(64 << 20, dtype=torch.uint8)]
    grown = read.peak()
    assert grown is not None
    assert grown - after > 50 << 20
    held.clear()


def test_where_the_mark_may_not_be_reset_no_peak_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(instruments, "reset_peak_resident", lambda: False)
    assert instruments_of(CPU).peak() is None


def test_capacity_is_what_the_process_has_and_could_get(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(instruments, "available_bytes", lambda: 12345)
    found = instruments_of(CPU)
    assert found.capacity == pytest.approx(psutil.Process().memory_info().rss + 12345, rel=0.05)
    assert not found.survives
    assert found.cores >= 1
