import copy
import json
import platform
import subprocess
import sys
from pathlib import Path

import pytest

import stoker
from stoker.record.environment import collect, differences


@pytest.fixture
def here() -> dict:
    return collect(device="cpu", threads=2, sampling="operators", update="operators")


def test_says_what_the_run_ran_on(here: dict) -> None:
    assert here["versions"]["python"] == platform.python_version()
    assert {"torch", "transformers", "numpy"} <= set(here["versions"])
    assert here["threads"] == 2
    assert here["cpu"]["logical"] >= 1
    assert here["memory_bytes"] > 2**28
    assert json.loads(json.dumps(here)) == here


def test_failure_42_no_secret_of_the_environment_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "OMP_SECRET"):
        monkeypatch.setenv(name, "hunter2-very-secret")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    recorded = collect(device="cpu", threads=1, sampling="operators", update="operators")
    assert "hunter2" not in json.dumps(recorded)
    assert recorded["variables"]["OMP_NUM_THREADS"] == "1"


def test_the_same_machine_is_bit_exact(here: dict) -> None:
    assert differences(here, collect(device="cpu", threads=2, sampling="operators", update="operators")) == []
    assert differences(here, here | {"host": "another", "memory_bytes": 1, "system": "Linux 1"}) == []


def test_what_changes_bits_is_named(here: dict) -> None:
    now = copy.deepcopy(here)
    here["cpu"]["isa"] = ["avx2", "avx512f", "fma"]
    now["cpu"]["isa"] = ["amx_bf16", "avx2", "fma"]
    now["threads"] = 16
    here["versions"]["torch"], now["versions"]["torch"] = "2.13.0", "2.14.0"
    del now["versions"]["numpy"]
    here["variables"], now["variables"] = {}, {"MKL_CBWR": "AVX2"}
    here["gpus"] = ["NVIDIA H200"]
    lines = differences(here, now)
    assert lines[0] == "cpu.isa: lost avx512f; gained amx_bf16"
    assert "gpus: ['NVIDIA H200'] -> []" in lines
    assert "threads: 2 -> 16" in lines
    assert "variables.MKL_CBWR: not set -> AVX2" in lines
    assert "versions.torch: 2.13.0 -> 2.14.0" in lines
    assert any(line.startswith("versions.numpy: ") and line.endswith(" -> not set") for line in lines)
    assert len(lines) == 6


def test_nothing_in_record_needs_torch() -> None:
    folder = Path(next(iter(stoker.__path__)))
    modules = [f"stoker.record.{path.stem}" for path in (folder / "record").glob("*.py") if path.stem != "__init__"]
    program = f"import sys, importlib; [importlib.import_module(m) for m in {modules}]; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=folder.parent, capture_output=True, text=True, check=True
    )
    assert done.stdout == "False\n"
