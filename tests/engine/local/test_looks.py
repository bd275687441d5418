"""What looks at the sums of an update show, against the gradient of each part taken alone."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from stoker.engine.local.learner import LocalLearner
from stoker.engine.local.load import cast_weights
from stoker.engine.local.looks import Looks, _prime_from
from stoker.rl.noise import parts_of
from stoker.rl.types import Objective, TrainBatch, TrainRow

Make = Callable[..., Any]
POLICY = Objective("policy")


def grouped(make_rows: Make, prompts: int = 3, samples: int = 4) -> list[TrainRow]:
    """The first prompt's group has no advantage."""
    made = make_rows(prompts * samples)
    rows = []
    for place, row in enumerate(made):
        prompt, index = divmod(place, samples)
        one = replace(row, sample_id=f"s:{prompt}/{index}", prompt_ids=made[prompt * samples].prompt_ids)
        rows.append(replace(one, advantages=one.advantages * (prompt > 0)))
    return rows


def alone(learner: LocalLearner, rows: tuple[TrainRow, ...]) -> Tensor:
    """The gradient of some rows, in float64; the sums are as before afterwards."""
    optimizer = learner._optimizers["policy"]
    earlier = optimizer.gradients()
    optimizer.zero()
    learner.forward_backward(TrainBatch(rows), POLICY)
    sizes = optimizer.sizes()
    found = [
        torch.zeros(size) if g is None else g.detach().flatten()
        for g, size in zip(optimizer.gradients(), sizes, strict=True)
    ]
    optimizer.set_gradients(earlier)
    return torch.cat(found).double()


def wanted(learner: LocalLearner, rows: list[TrainRow]) -> tuple[float, float, float]:
    """Trace, signal and V_between of one group in a part, by the gradients of all its halves."""
    parts = parts_of(rows, "token")
    halves = [[alone(learner, half) for half in part.halves] for part in parts]
    weights = [part.share for part in parts]
    sums = [a + b for a, b in halves]
    whole = torch.stack(sums).sum(0)
    crossed = float(whole @ whole) - sum(float(h @ h) for h in sums)
    signal = crossed / (1 - sum(w * w for w in weights))
    same = sum(a * b for part in parts for a, b in part.shares)
    own = sum(float(a @ b) for a, b in halves) / same
    return len(parts) * (float(whole @ whole) - signal), signal, own / (1 + 1 / 49) - signal


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("budget", [13, 4096])
def test_parts_are_told_apart_however_they_are_cut(
    tiny_llama: PreTrainedModel, make_learner: Make, make_rows: Make, gradients: Make, dtype: torch.dtype, budget: int
) -> None:
    """Also where gradients of an earlier batch are there: they stay, and don't count."""
    learner = make_learner(cast_weights(tiny_llama, dtype), update={"tokens_per_microbatch": budget})
    rows = grouped(make_rows)
    trace, signal, between = wanted(learner, rows)
    learner.forward_backward(TrainBatch(tuple(make_rows(2, seed=5))), POLICY)
    earlier = gradients(learner).clone()
    metrics = learner.forward_backward(TrainBatch(tuple(rows), measure=3), POLICY)
    found = (metrics["noise/trace"], metrics["noise/signal"], metrics["noise/between"])
    assert found == pytest.approx((trace, signal, between), rel=2e-2 if dtype == torch.bfloat16 else 1e-3)
    expected = earlier.double() + alone(learner, tuple(rows))
    assert float((gradients(learner) - expected).norm() / expected.norm()) < (5e-2 if dtype == torch.bfloat16 else 1e-5)


def test_adapters_alone_are_looked_at(tiny_llama: PreTrainedModel, make_learner: Make, make_rows: Make) -> None:
    learner = make_learner(tiny_llama, lora={"rank": 2})
    rows = grouped(make_rows)
    expected = wanted(learner, rows)
    metrics = learner.forward_backward(TrainBatch(tuple(rows), measure=0), POLICY)
    found = (metrics["noise/trace"], metrics["noise/signal"], metrics["noise/between"])
    assert found == pytest.approx(expected, rel=1e-3)


class Sums:
    """Two parameters' sums, to be set."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.held: list[Tensor | None] = [None, None]

    def sizes(self) -> list[int]:
        return [7, 4]

    def gradients(self) -> list[Tensor | None]:
        return self.held


def test_looks_at_some_weights_are_right_in_the_mean_over_where_they_begin() -> None:
    """Each weight is looked at from exactly one beginning."""
    halves = torch.randn(4, 11, generator=torch.Generator().manual_seed(0))
    seen: dict[tuple[int, ...], tuple[float, ...]] = {}
    for seed in range(40):
        sums = Sums()
        looks = Looks(sums, seed, weights=4)  # type: ignore[arg-type]
        for number in range(1, 5):
            total = halves[:number].sum(0)
            sums.held = [total[:7], total[7:]]
            looks.look()
        numbers = torch.stack(looks._found).double() * looks._stride
        seen[tuple(looks._firsts)] = tuple(numbers.tolist())
    assert len(seen) == 3
    means = np.mean(list(seen.values()), axis=0)
    a, b, c, d = halves.double()
    expected = [(a + b) @ (a + b), a @ b, (c + d) @ (c + d), c @ d]
    assert means == pytest.approx([float(one) for one in expected], rel=1e-4)


def test_a_single_prompt_is_no_measurement(tiny_llama: PreTrainedModel, make_learner: Make, make_rows: Make) -> None:
    metrics = make_learner(tiny_llama).forward_backward(TrainBatch(tuple(grouped(make_rows, 1)), measure=0), POLICY)
    assert np.isnan(metrics["noise/trace"]) and "noise/between" not in metrics


def test_strides_are_primes_or_one() -> None:
    assert [_prime_from(n) for n in (1, 2, 4, 32, 33)] == [1, 2, 5, 37, 37]
