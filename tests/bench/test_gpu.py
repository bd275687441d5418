"""The GPU bench's paper work, and all of it on a CPU with tiny sizes."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from bench import gpu
from bench.gpu_tables import QWEN3, data_sheet_flops, markdown, published_rows, table
from stoker.batch.flops import work_of_config
from stoker.errors import RunError

CPU = torch.device("cpu")


def test_shapes_have_the_sizes_of_their_names() -> None:
    parameters = {}
    for name, sizes in QWEN3.items():
        work = work_of_config(AutoConfig.for_model("qwen3", **sizes, **gpu.COMMON))
        assert work is not None
        parameters[name] = work.linear + work.head
    assert [round(count / 1e9, 2) for count in parameters.values()] == [0.6, 1.72, 4.02]


def test_the_published_mfu_follows_from_its_tokens_per_second_by_our_count() -> None:
    row = published_rows()[0]
    work = work_of_config(AutoConfig.for_model("qwen3", **QWEN3["Qwen3-0.6B"], **gpu.COMMON))
    assert work is not None
    mfu = work.training(row["tokens"]) / row["tokens"] * row["tokens_per_s"] / 989e12
    assert mfu == pytest.approx(row["mfu_of_data_sheet"], abs=0.0006)


def test_data_sheets() -> None:
    assert data_sheet_flops("NVIDIA H200") == 989e12
    assert data_sheet_flops("NVIDIA H100 PCIe") == 756e12
    assert data_sheet_flops("some CPU") is None


def test_a_table_leaves_what_it_lacks_empty() -> None:
    columns = (("name", "name", str), ("share", "x", lambda v: f"{v:.0%}"))
    assert table(columns, [{"name": "a", "x": 0.5}, {"name": "b", "x": None}]).splitlines() == [
        "| name | share |",
        "| --- | --- |",
        "| a | 50% |",
        "| b |  |",
    ]


def test_one_row_fills_its_tokens() -> None:
    row = gpu.one_row(512, 200)
    assert len(row.prompt_ids) + len(row.token_ids) - 1 == 200
    assert row.weights.sum() == pytest.approx(1.0)


def test_a_row_says_why_it_has_no_figures() -> None:
    plan = gpu.Plan(CPU, rehearsal=True)

    def no_room() -> dict[str, Any]:
        raise RunError("memory ran out in a micro-batch of one row")

    assert gpu._within_memory(plan, {"model": "m"}, no_room)["note"] == "out of memory"

    def broken() -> dict[str, Any]:
        raise RuntimeError("shapes don't match")

    with pytest.raises(RuntimeError, match="shapes"):
        gpu._within_memory(plan, {"model": "m"}, broken)
    late = gpu.Plan(CPU, rehearsal=True, budget=-1)
    assert gpu._within_memory(late, {"model": "m"}, broken) == {"model": "m", "note": gpu.TOO_LATE}


def test_a_wrong_device_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second model of the pair, the device's, has one weight off."""
    made = []

    def spoilt(model: Any, **tables: Any) -> gpu.Engine:
        if made:
            with torch.no_grad():
                model.get_parameter("model.layers.0.mlp.up_proj.weight")[0].add_(1.0)
        made.append(model)
        return of(model, **tables)

    of = gpu.Engine.of
    monkeypatch.setattr(gpu.Engine, "of", spoilt)
    found = gpu.correctness(gpu.Plan(CPU, rehearsal=True))
    assert not all(check["right"] for check in found)
    assert not found[0]["right"]


@pytest.mark.slow
def test_the_rehearsal_runs_every_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(gpu, "QWEN3", {"Qwen3-0.6B": QWEN3["Qwen3-0.6B"]})
    result = gpu.measure(gpu.Plan(CPU, rehearsal=True))
    assert all(check["right"] and check["found"] == 0 for check in result["correctness"])
    assert len(result["updates"]) == len(result["sampling"]) == 2
    for row in (*result["updates"], *result["sampling"]):
        assert row["tokens_per_s"] > 0
        assert row["peak_gib"] > 0
    text = markdown(json.loads(json.dumps(result)))
    assert text.count("prime-rl, P") == 3
    assert "a rehearsal" in text


def test_the_script_is_sound() -> None:
    script = Path(gpu.__file__).with_name("gpu.sh")
    done = subprocess.run(["bash", "-n", str(script)], capture_output=True, text=True, timeout=30, check=False)
    assert (done.returncode, done.stderr) == (0, "")
