"""Draws and their log-probs against chi-square, closed forms and edges."""

import math

import numpy as np
import pytest
import torch
from scipy import stats

from stoker.engine.local import distribution
from stoker.engine.local.distribution import draw
from stoker.engine.local.uniforms import sample_keys, uniforms
from stoker.rl.types import Prompt, Request, SamplingParams

ALMOST_ONE = 1 - 2.0**-53


def keys(count: int, prompt: str = "a", seed: int = 0) -> np.ndarray:
    owner = Prompt(id=prompt, token_ids=(1,), content="", answer=None)
    return sample_keys([Request(owner, index, SamplingParams(), seed) for index in range(count)])


def spread(vocabulary: int, scale: float = 2.0) -> torch.Tensor:
    return torch.randn(vocabulary, generator=torch.Generator().manual_seed(3)) * scale


def test_uniforms_are_splitmix64() -> None:
    # First outputs of the reference implementation (Vigna, splitmix64.c) from state 0 and 1234567.
    reference = {0: [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4], 1234567: [0x599ED017FB08FC85, 0x2C73F08458540FA5]}
    for state, outputs in reference.items():
        for position, output in enumerate(outputs):
            assert uniforms(np.array([state], np.uint64), position)[0] == (output >> 11) / 2**53


def test_uniforms_are_uniform_and_distinct() -> None:
    numbers = np.stack([uniforms(keys(500), position) for position in range(40)])
    assert len(np.unique(numbers)) == numbers.size and numbers.min() >= 0 and numbers.max() < 1
    assert stats.kstest(numbers.ravel(), "uniform").pvalue > 0.01
    assert abs(np.corrcoef(numbers[:-1].ravel(), numbers[1:].ravel())[0, 1]) < 0.02
    assert not np.intersect1d(keys(50), keys(50, seed=1)).size and not np.intersect1d(keys(50), keys(50, "b")).size


@pytest.mark.parametrize(
    ("vocabulary", "params"),
    [
        (7, SamplingParams()),
        (600, SamplingParams(temperature=0.7)),
        (600, SamplingParams(top_p=0.8)),
        (600, SamplingParams(top_k=9, temperature=1.5)),
    ],
)
def test_draws_follow_the_distribution(vocabulary: int, params: SamplingParams) -> None:
    count = 40_000
    logits = spread(vocabulary)
    numbers = torch.from_numpy(uniforms(keys(count), 0))
    drawn = torch.cat([draw(logits.expand(len(part), -1), part, params).token_ids for part in numbers.split(2000)])
    expected = reference(logits, params).numpy() * count
    seen = np.bincount(drawn, minlength=vocabulary)
    assert seen[expected == 0].sum() == 0
    common = expected >= 5
    seen_bins = np.append(seen[common], seen[~common].sum() + 1e-9)
    expected_bins = np.append(expected[common], expected[~common].sum() + 1e-9)
    assert stats.chisquare(seen_bins, expected_bins * seen_bins.sum() / expected_bins.sum()).pvalue > 0.01


def reference(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Probabilities (V,) by the plain definition: sort, cut, renormalise."""
    probabilities = (logits.double() / params.temperature).softmax(-1)
    ranked, order = probabilities.sort(descending=True, stable=True)
    if params.top_k:
        ranked[params.top_k :] = 0
        ranked = ranked / ranked.sum()
    ranked[(ranked.cumsum(-1) - ranked) >= params.top_p] = 0
    return torch.zeros_like(ranked).scatter(0, order, ranked / ranked.sum())


@pytest.mark.parametrize("vocabulary", [5, 256, 1000, 3000])
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.8),
        SamplingParams(top_p=0.3),
        SamplingParams(top_p=0.999, temperature=2.0),  # past the first candidates
        SamplingParams(top_k=4),
        SamplingParams(top_k=2500, top_p=0.95),
    ],
)
def test_logprobs_and_kept_tokens(vocabulary: int, params: SamplingParams) -> None:
    logits = torch.stack([spread(vocabulary, scale) for scale in (0.01, 1.0, 30.0)])
    drawn = draw(logits, torch.tensor([0.2, 0.6, 0.9], dtype=torch.float64), params)
    for row, token in enumerate(drawn.token_ids.tolist()):
        probabilities = reference(logits[row], params)
        assert drawn.logprobs[row].item() == pytest.approx(probabilities[token].log().item(), abs=2e-5)
        if params.truncates:
            kept = drawn.kept_ids[row, : drawn.kept_counts[row]].tolist()
            assert set(kept) == set(probabilities.nonzero()[:, 0].tolist()) or near_cut(probabilities, kept)
        else:
            assert drawn.kept_ids is None


def near_cut(probabilities: torch.Tensor, kept: list[int]) -> bool:
    """One token more or less, where the mass meets top_p within rounding."""
    return len(set(kept) ^ set(probabilities.nonzero()[:, 0].tolist())) <= 1 and probabilities.min() < 1e-3


def test_no_token_of_probability_zero_at_the_edges() -> None:
    logits = torch.full((2, 700), -torch.inf)
    logits[:, 300], logits[:, 400] = 0.0, 1.0
    for params in (SamplingParams(), SamplingParams(top_p=0.99), SamplingParams(top_k=500)):
        first, last = draw(logits, torch.tensor([0.0, ALMOST_ONE], dtype=torch.float64), params).token_ids.tolist()
        assert {first, last} == {300, 400}
        assert draw(logits, torch.tensor([1.0, 1.0]), params).token_ids[0] in (300, 400), "u rounded up to 1"


def test_ties_at_the_cut_keep_the_smaller_ids() -> None:
    logits = torch.zeros(1, 5000)
    logits[0, 4000] = 1.0
    half = torch.tensor([0.5], dtype=torch.float64)
    kept = draw(logits, half, SamplingParams(top_k=4))
    assert kept.kept_ids is not None and kept.kept_ids[0].tolist() == [4000, 0, 1, 2]
    share = (math.e + 9.5) / (math.e + 4999)
    kept = draw(logits, half, SamplingParams(top_p=share))
    assert kept.kept_ids is not None and kept.kept_ids[0].tolist() == [4000, *range(10)]


def test_top_p_always_keeps_one() -> None:
    kept = draw(torch.tensor([[0.0, 9.0, 0.0]]), torch.tensor([0.99]), SamplingParams(top_p=1e-6))
    assert kept.token_ids.tolist() == [1] and kept.logprobs.tolist() == [0.0]
    assert kept.kept_counts is not None and kept.kept_counts.tolist() == [1]


def test_candidates_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = (spread(6000, 1.5) * 8).round().expand(4, -1) / 8  # many ties, as in bfloat16
    numbers = torch.tensor([0.1, 0.4, 0.7, 0.97], dtype=torch.float64)
    for params in (SamplingParams(top_p=0.9), SamplingParams(top_k=50), SamplingParams(top_k=300, top_p=0.9)):
        fast = draw(logits, numbers, params)
        with monkeypatch.context() as patch:
            patch.setattr(distribution, "_candidates", lambda _params: 6000)
            slow = draw(logits, numbers, params)
        for name in ("token_ids", "logprobs", "kept_ids", "kept_counts"):
            torch.testing.assert_close(getattr(fast, name), getattr(slow, name), msg=f"{params} {name}")


def test_bfloat16_logits_give_float32_logprobs() -> None:
    logits = spread(1000).bfloat16()[None]
    drawn = draw(logits, torch.tensor([0.3], dtype=torch.float64), SamplingParams(temperature=0.9))
    expected = (logits.float() / 0.9).log_softmax(-1)[0, drawn.token_ids[0]]
    assert drawn.logprobs.dtype == torch.float32
    assert drawn.logprobs[0].item() == pytest.approx(expected.item(), abs=1e-5)
