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
    return [
        {
            "architecture": name,
            "checkpointing": again,
            "growth": (1.3 if again else 1.1) * size * (2 if name == "c" else 1) + 1e8,
            "predicted": size,
        }
        for name, sizes in {"a": (2e9, 3e9), "b": (4e9, 5e9), "c": (9e9, 3e9)}.items()
        for size in sizes
        for again in (False, True)
    ]


def test_a_margin_is_found() -> None:
    found = memory.fitted(rows()[:8])
    assert (found.share, found.fixed, found.checkpointing) == pytest.approx((0.1, 1e8, 0.2), rel=1e-3)
    assert found.resolved(True) == Margin(found.share + found.checkpointing, found.fixed)


def test_an_architecture_is_judged_by_the_others() -> None:
    last = memory.judged(rows())[-1]
    assert last["architecture"] == "c" and last["error"] < -0.4
    assert last["expected"] == pytest.approx(1.3 * 3e9 + 1e8)


def test_a_child_says_how_much_it_has_grown() -> None:
    found = memory.grow(memory.Case("llama", "fp32", "sgd", "loop", True, 1, 8, vocabulary=64, layers=1))
    assert json.loads(json.dumps(found))["growth"] >= 0 and found["baseline"] > 0
