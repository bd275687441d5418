"""The result itself; what a sweep puts into it is in test_sweep."""

import pytest

from stoker.batch.swept import DataShare, Point, Remedy


def test_flop_per_byte_needs_both() -> None:
    point = Point(8, 0.1, (0.1, 0.1), 80.0, None, None, flops=600, moved_bytes=200)
    assert point.flop_per_byte == 3
    assert Point(8, 0.1, (0.1, 0.1), 80.0, None, None).flop_per_byte is None


def test_gain_is_of_throughput() -> None:
    """From 3 s a unit to 2: half as much again."""
    assert Remedy("workers", "0 -> 1", 0.4, False, "", 3.0, 2.0).measured == pytest.approx(0.5)
    assert Remedy("workers", "0 -> 1", 0.4, False, "", 3.0, None).measured is None


def test_what_a_loader_costs_beside_waiting() -> None:
    assert DataShare(1.0, 0.2, 0.5, None).slowed == pytest.approx(0.3)
