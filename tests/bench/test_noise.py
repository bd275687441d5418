"""The bench's truths against large samples, and that it runs."""

import numpy as np
import pytest

from bench import noise


@pytest.mark.parametrize("problem", [noise.quadratic((1, 3, 4)), noise.regression(4, 2), noise.ragged(4, 3)])
def test_truth_of_a_problem(problem: noise.Problem) -> None:
    gradients, counts = problem.draw(np.random.default_rng(0), 20_000)
    total = counts.sum(axis=1)
    whole = (gradients * counts[..., None]).sum(axis=1) / total[:, None]
    mean = whole.mean(axis=0)
    assert mean @ mean == pytest.approx(problem.signal, rel=0.05)
    assert total[0] * whole.var(axis=0).sum() == pytest.approx(problem.trace, rel=0.01)


def test_a_few_runs(capsys: pytest.CaptureFixture[str]) -> None:
    row = noise.examine(noise.CASES[0], 20, 0)
    assert row["estimator"] == "two sizes" and min(row["coverage"].values()) > 0.7
    assert "two sizes" in capsys.readouterr().out
