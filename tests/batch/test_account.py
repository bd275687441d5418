"""Parts and levers from numbers set up by hand."""

from typing import Any

import pytest

from stoker.batch.account import largest_layer, parts_of_peak
from stoker.batch.certificate import Trial, growth
from stoker.batch.levers import levers_of


def layer(name: str, fixed: float, per_unit: float) -> dict[str, Any]:
    return {"name": name, "kind": "Linear", "fixed": fixed, "per_unit": per_unit}


TRACE = {
    "weight_bytes": 400,
    "gradient_bytes": 400,
    "buffer_bytes": 8,
    "parameters": 100,
    "state_bytes": 800,
    "device": "cpu",
    "layers": [
        layer("batch", 0, 500),
        layer("a", 10, 100),
        layer("b", 900, 20),
        layer("c", 0, 80),
        layer("loss", 0, 1),
    ],
}


def trial(size: int, peak: int | None) -> Trial:
    return Trial(size, "ran" if peak else "out of memory", 2, peak, 0.1, 1.0, None)


TRIALS = [trial(1, 3000), trial(2, 3800), trial(10, 10_200), trial(11, None)]


def test_growth_is_between_the_smallest_and_the_largest() -> None:
    assert growth(TRIALS) == 800.0
    assert growth(TRIALS[:1]) is None


def test_peaks_that_do_not_grow_show_no_growth() -> None:
    """In a process that had memory free, activations were negative, and a lever made room for -325 examples."""
    assert growth([trial(1, 3600), trial(24, 1800)]) is None
    parts = {part.name: part for part in parts_of_peak(TRACE, {"weights": 400}, [trial(1, 3600), trial(24, 0)], 24, 0)}
    assert parts["activations"].measured is None
    assert all(lever.more_units is None for lever in levers_of(TRACE, 24, 800, None, "examples"))


def test_parts_add_up_to_the_peak() -> None:
    held = {"weights": 400, "gradients": 400, "states": 810, "buffers": 8}
    parts = {part.name: part for part in parts_of_peak(TRACE, held, TRIALS, 10, 10_200)}
    assert parts["activations"].measured == 8000
    assert parts["activations"].predicted == 910 + 701 * 10
    assert parts["states"].predicted == 800
    assert (parts["other"].measured, parts["other"].predicted) == (10_200 - 8000 - 400 - 400 - 810 - 8, None)
    assert sum(part.measured for part in parts.values()) == 10_200


def test_what_is_not_known_is_none() -> None:
    assert parts_of_peak(None, {}, [], 10, None) == ()
    unknown = parts_of_peak(TRACE | {"state_bytes": None}, {"weights": 400}, [], 10, None)
    assert {part.name: part.predicted for part in unknown}["states"] is None
    assert largest_layer(None, 3) is None


def test_the_largest_layer_depends_on_the_size() -> None:
    assert largest_layer(TRACE, 1).name == "b"  # 920 against 110
    assert largest_layer(TRACE, 100).name == "a"  # 10010 against 2900
    assert largest_layer(TRACE, 100).bytes_kept == 10_010  # the batch, 50,000 bytes, is no layer


def test_the_ladder_with_its_savings() -> None:
    ladder = {one.name: one for one in levers_of(TRACE, 10, 800, 800.0, "examples")}
    inside = 10 + 1000 + 900 + 200 + 800 + 10
    assert ladder["mixed precision"].saves_bytes == inside // 2 - 200  # and a copy of the weights in 16 bit
    assert ladder["half the input length"].saves_bytes == (inside + 5000) // 2
    assert ladder["half the micro-batch, accumulated twice (5 examples)"].saves_bytes == (5000 + 2010) // 2
    assert ladder["optimizer offload"].saves_bytes == 800
    assert ladder["optimizer offload"].more_units == 1
    assert ladder["8-bit optimizer"].saves_bytes == pytest.approx(800 * (8 - 2.03) / 8, abs=1)
    assert [*ladder][-1] == "optimizer offload"
    assert "checkpointing" not in ladder  # of three layers nothing would be saved


def test_levers_without_effect_are_left_out() -> None:
    half = TRACE | {"weight_bytes": 200, "device": "cuda"}
    names = [one.name for one in levers_of(half, 1, 0, None, "examples")]
    assert names == ["half the input length", "fragmentation"]


def test_checkpointing_keeps_about_a_root_of_the_layers() -> None:
    deep = TRACE | {"layers": [layer(str(place), 0, 10) for place in range(16)]}
    found = next(one for one in levers_of(deep, 10, 0, 160.0, "examples") if one.name == "checkpointing")
    assert found.saves_bytes == 1600 // 2
    assert found.more_units == 5
