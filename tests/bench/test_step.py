"""The step bench with sizes that only show that it runs and adds up."""

import pytest
import torch

from bench import step
from bench.engine import random_model, rows_of
from bench.roofline import Limits

CPU = torch.device("cpu")
SIZES = {"prompts": 2, "samples": 2, "prompt_tokens": 5, "new_tokens": 4}
TINY = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 997}


def test_distances_of_a_tiny_model() -> None:
    engine = step.Engine.of(random_model("llama", CPU, "float32", **TINY))
    limits = Limits(flops=2e10, bandwidth=2e9)
    found = step.distances(engine, SIZES, limits, repeats=1)
    assert list(found) == ["sample", "score", "update"]
    for name, phase in found.items():
        assert phase["seconds"] > 0 and 0 <= phase["share_of_peak"] < 1
        if name != "sample":  # compiled functions hide the shapes of what they compute
            assert phase["share_of_peak"] <= phase["executed_share_of_peak"] < 1
    assert 0 < found["sample"]["share_of_roofline"] < 1


def test_answers_run_to_their_full_length_and_rows_weigh_them_equally() -> None:
    engine = step.Engine.of(random_model("llama", CPU, "float32", **TINY))
    samples = engine.draw(**SIZES)
    assert [len(sample.token_ids) for sample in samples] == [4] * 4
    rows = rows_of(samples)
    assert sum(row.weights.sum() for row in rows) == pytest.approx(1.0)
    assert len({row.advantages[0] for row in rows}) > 1


@pytest.mark.slow
def test_growth_has_an_exponent_for_every_axis_and_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step, "QUICK", SIZES)
    monkeypatch.setattr(step, "QUICK_MODELS", ((32, 1), (64, 1)))
    found = step.growth(CPU, "float32", quick=True)
    assert found.keys() == {"samples", "new_tokens", "weights"}
    assert all(fit["exponent"] > -5 for axis in found.values() for fit in axis.values())
