"""The compute dtype is chosen by what this device multiplies fastest."""

import time

import pytest
import torch

from stoker.config.schema import Model
from stoker.engine.local import dtype
from stoker.engine.local.load import load_model

CPU = torch.device("cpu")


@pytest.fixture
def bfloat16_takes(monkeypatch: pytest.MonkeyPatch):
    """Pretend that a product in a 16-bit dtype takes this many times as long as in float32."""

    def set_to(factor: float) -> None:
        monkeypatch.setattr(dtype, "_seconds", lambda kind, device: 1.0 if kind == torch.float32 else factor)

    return set_to


@pytest.mark.parametrize(
    ("factor", "chosen"), [(80.0, "float32"), (1.0, "float32"), (0.9, "float32"), (0.4, "bfloat16")]
)
def test_bfloat16_only_where_it_is_clearly_faster(bfloat16_takes, factor: float, chosen: str) -> None:
    bfloat16_takes(factor)
    assert dtype.fastest_dtype(CPU) == chosen


def test_a_slow_dtype_is_warned_of_with_its_factor(bfloat16_takes) -> None:
    bfloat16_takes(80.0)
    assert "bfloat16': matrix products take 80 times as long" in dtype.wasteful("bfloat16", CPU)
    assert dtype.wasteful("float32", CPU) == ""
    bfloat16_takes(0.5)
    assert dtype.wasteful("bfloat16", CPU) == ""


def test_the_measurement_agrees_with_larger_products() -> None:
    """The choice made on small products holds on large ones, on whatever machine this is."""
    ones = {kind: torch.ones(512, 512, dtype=kind) for kind in (torch.float32, torch.bfloat16)}
    seconds = {kind: min(_time(one) for _ in range(3)) for kind, one in ones.items()}
    ratio = seconds[torch.bfloat16] / seconds[torch.float32]
    if 0.5 < ratio < 1.5:
        pytest.skip("the two are about equally fast here")
    assert dtype.fastest_dtype(CPU) == ("bfloat16" if ratio < 1 else "float32")


def _time(one: torch.Tensor) -> float:
    start = time.perf_counter()
    (one @ one)[0, 0].item()
    return time.perf_counter() - start


def test_auto_loads_in_it(bfloat16_takes) -> None:
    bfloat16_takes(0.1)
    assert load_model(Model(path="embedded:tiny", from_scratch=True, dtype="auto"), 0).dtype == torch.bfloat16
