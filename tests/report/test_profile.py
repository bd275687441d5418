"""The table of a profile that was made by hand."""

from pathlib import Path
from typing import Any

import pytest

from stoker.errors import RunError
from stoker.record.disk import write_json
from stoker.report.profile import rate, read_profile, render


def phase(seconds: float, tokens: int = 0, **more: Any) -> dict[str, Any]:
    empty = {"mfu": None, "hfu": None, "operators": [], "in_operators": 0.0}
    return {"seconds": seconds, "tokens": tokens, "algorithmic_flops": 0, "executed_flops": 0, **empty, **more}


PROFILE = {
    "steps": [2, 3],
    "seconds": 10.0,
    "unprofiled_step_seconds": 4.5,
    "device": "cpu",
    "dtype": "float32",
    "threads": 2,
    "matmul_peak_flops": 83.14e9,
    "tokens_per_second": 102.4,
    "padding": 0.125,
    "phases": {
        "reward": phase(1.0),
        "sample": phase(
            8.0,
            1024,
            mfu=0.1234,
            in_operators=6.0,
            operators=[
                {"name": "aten::mm", "seconds": 4.0, "calls": 10},
                {"name": "aten::add", "seconds": 1, "calls": 2},
            ],
        ),
        "update": phase(1.0, 2000, mfu=0.25, hfu=0.5),
    },
}


def test_the_table_shows_each_phase_the_longest_first() -> None:
    lines = render(PROFILE, Path("runs/one")).splitlines()
    assert lines[0] == "profile of steps 2 to 3: 5.00 s a step, tracing included (the unprofiled one before: 4.50 s)"
    assert lines[1] == "matmul peak measured here: 83.1 GFLOP/s (cpu, float32, 2 threads)"
    assert lines[2] == "102.4 answer tokens/s over all phases; 12.5% of the micro-batches' tokens is padding"
    table = [line.split() for line in lines[4:8]]
    assert table == [
        ["phase", "s/step", "share", "tokens/s", "MFU", "HFU"],
        ["sample", "4.000", "80.0%", "128", "12.3%"],
        ["reward", "0.500", "10.0%"],
        ["update", "0.500", "10.0%", "2,000", "25.0%", "50.0%"],
    ]
    assert "  sample: aten::mm 50.0%, aten::add 12.5%; between operators 25.0%" in lines
    assert "runs/one/trace.json.gz" in lines[-1]


def test_one_step_without_micro_batches() -> None:
    text = render({**PROFILE, "steps": [2], "padding": None}, Path("r"))
    assert text.startswith("profile of step 2: 10.00 s a step")
    assert "padding\n" not in text.split("phase")[0]


def test_rates_have_a_prefix() -> None:
    assert [rate(x) for x in (5.0, 2.5e6, 7.91e14)] == ["5.0 FLOP/s", "2.5 MFLOP/s", "791.0 TFLOP/s"]


def test_a_folder_without_a_profile_says_how_to_make_one(tmp_path: Path) -> None:
    write_json(tmp_path / "profile.json", PROFILE)
    assert read_profile(tmp_path)["padding"] == 0.125
    with pytest.raises(RunError, match="--profile"):
        read_profile(tmp_path / "none")
