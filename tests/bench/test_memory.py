"""What the bench compares, and how it fits; the processes themselves are its own affair."""

import json

import pytest

from bench import memory
from stoker.memory.breakdown import Margin


def test_set_ups_are_many_and_of_the_size_that_is_promised() -> None:
    found = memory.cases()
    assert len(found) >= 12 and len({case.architecture for case in found}) == 4
    assert {case.precision for case in found} == {"fp32", "autocast", "bf16"}
    assert {case.checkpointing for case in found} == {False, True}
    peaks = [case.predicted() for case in found]
    assert all(2e9 < peak.peak < 6 * 2**30 for peak in peaks)
    assert len({peak.moment for peak in peaks}) >= 3


def rows() -> list[dict[str, object]]:
    """Two architectures that a margin fits exactly, and one that it doesn't."""
    growth = {"a": (2e9, 3e9), "b": (4e9, 5e9), "c": (9e9, 3e9)}
    return [
        {"architecture": name, "growth": 1.1 * size * (2 if name == "c" else 1) + 1e8, "predicted": size}
        for name, sizes in growth.items()
        for size in sizes
    ]


def test_a_margin_is_found() -> None:
    found = memory.fitted(rows()[:4])
    assert (found.share, found.fixed) == (pytest.approx(0.1), pytest.approx(1e8, rel=1e-3))
    assert isinstance(found, Margin)


def test_an_architecture_is_judged_by_the_others() -> None:
    judged = {row["architecture"]: row for row in memory.judged(rows())}
    assert judged["c"]["error"] < -0.4
    assert judged["c"]["expected"] == pytest.approx(1.1 * 3e9 + 1e8)


def test_a_child_says_how_much_it_has_grown() -> None:
    found = memory.grow(memory.Case("llama", "fp32", "sgd", "loop", True, 1, 8, vocabulary=64, layers=1))
    assert json.loads(json.dumps(found))["growth"] >= 0 and found["baseline"] > 0
