"""Gradients by enumeration: all two-token sequences over three tokens, each with its probability."""

import json
import math
from dataclasses import asdict

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributions import Categorical, kl_divergence

from stoker.errors import ConfigError, RunError
from stoker.rl.advantages import gae, token_rewards
from stoker.rl.kl import ESTIMATORS, AdaptiveKl, KlState, alarm, default_horizon, k1, k2, k3, kl_loss
from stoker.rl.losses import Terms, evaluate
from stoker.rl.types import Objective

V = 3
SEQUENCES = torch.cartesian_prod(torch.arange(V), torch.arange(V))  # (9, 2)
MASK = torch.ones(V * V, 2, dtype=torch.bool)


def logits_of(theta: Tensor) -> tuple[Tensor, Tensor]:
    """Of the first token (3,), and of the second given the first (3, 3)."""
    return theta[:V], theta[V:].view(V, V)


def logprobs_of(theta: Tensor) -> Tensor:
    """(9, 2): every sequence's token log-probs."""
    first, second = (logits.log_softmax(-1) for logits in logits_of(theta))
    a, b = SEQUENCES.unbind(1)
    return torch.stack([first[a], second[a, b]], dim=1)


def draw(seed: int) -> Tensor:
    return torch.randn(V + V * V, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


THETA, REFERENCE, OLD = draw(0).requires_grad_(), draw(1), draw(2)


def gradient(loss: Tensor) -> Tensor:
    return torch.autograd.grad(loss, THETA)[0]


def sequence_kl(p: Tensor, q: Tensor) -> Tensor:
    """KL(p || q) over whole sequences, from its definition."""
    log_p, log_q = logprobs_of(p).sum(1), logprobs_of(q).sum(1)
    return (log_p.exp() * (log_p - log_q)).sum()


def token_kl(p: Tensor, q: Tensor, states: Tensor) -> Tensor:
    """Sum over positions of KL(p || q) at states drawn from a fixed policy: no credit for reaching them."""
    (p1, p2), (q1, q2) = ([Categorical(logits=logits) for logits in logits_of(theta)] for theta in (p, q))
    reached = Categorical(logits=logits_of(states)[0]).probs.detach()
    return kl_divergence(p1, q1) + (reached * kl_divergence(p2, q2)).sum()


def expected(per_token: Tensor, sampled_from: Tensor) -> Tensor:
    """Mean over sequences of the summed loss, the draw's probability carrying no gradient."""
    return (logprobs_of(sampled_from).sum(1).exp().detach() * per_token.sum(1)).sum()


def leash(estimator: str, level: str, old: Tensor | None = None) -> Tensor:
    """Gradient of the KL term as the learner sees it, averaged over all that could be sampled."""
    terms = Terms(
        mask=MASK,
        logprobs=logprobs_of(THETA),
        advantages=torch.zeros(MASK.shape, dtype=torch.float64),
        reference_logprobs=logprobs_of(REFERENCE),
        old_logprobs=None if old is None else logprobs_of(old),
    )
    loss, _ = evaluate(terms, Objective("policy", kl_coefficient=1.0, kl_estimator=estimator, kl_level=level))
    return gradient(expected(loss, THETA if old is None else old))


def in_reward(d: Tensor, level: str) -> Tensor:
    """Gradient of REINFORCE where minus the penalty `d` is the only reward."""
    rewards = token_rewards(np.zeros(len(d)), d.detach().numpy(), MASK.numpy(), kl_coefficient=1.0, level=level)
    advantages, _ = gae(rewards, np.zeros(MASK.shape), MASK.numpy(), gamma=1.0, lam=1.0)
    terms = Terms(mask=MASK, logprobs=logprobs_of(THETA), advantages=torch.from_numpy(advantages))
    return gradient(expected(evaluate(terms, Objective("policy"))[0], THETA))


def close(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a, b, atol=1e-12)


D = logprobs_of(THETA) - logprobs_of(REFERENCE)


def test_estimators_have_the_value_they_claim():
    exact = sequence_kl(THETA, REFERENCE)
    total = D.sum(1, keepdim=True)
    assert close(expected(k1(total), THETA), exact)
    assert close(expected(k3(total), THETA), exact)
    assert not close(expected(k2(total), THETA), exact)  # only to second order
    assert (k3(torch.linspace(-5, 5, 101)) >= 0).all()
    torch.testing.assert_close(k3(torch.tensor([math.log(2.0)])), torch.tensor([0.5 - 1 + math.log(2.0)]))


def test_peer_fault_12_k1_as_a_bare_loss_has_no_gradient():
    assert close(gradient(expected(k1(logprobs_of(THETA) - logprobs_of(REFERENCE)), THETA)), torch.zeros_like(THETA))


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_peer_fault_12_k1_in_the_reward_is_the_reverse_kl_of_sequences(level):
    assert close(in_reward(D, level), gradient(sequence_kl(THETA, REFERENCE)))


@pytest.mark.parametrize("estimator", [k2, k3])
def test_peer_fault_12_k2_and_k3_in_the_reward_are_not(estimator):
    assert not close(in_reward(estimator(D), "token"), gradient(sequence_kl(THETA, REFERENCE)))


def test_peer_fault_12_token_level_losses():
    reverse, forward = token_kl(THETA, REFERENCE, THETA), token_kl(REFERENCE, THETA, THETA)
    assert close(leash("k2", "token"), gradient(reverse))
    assert close(leash("k3", "token"), gradient(forward))
    assert close(leash("k1", "token"), gradient(token_kl(THETA, REFERENCE, THETA)))  # by its live importance weight


def test_peer_fault_12_sequence_level_losses():
    assert close(leash("k2", "sequence"), gradient(sequence_kl(THETA, REFERENCE)))
    assert close(leash("k3", "sequence"), gradient(sequence_kl(REFERENCE, THETA)))
    assert close(leash("k1", "sequence"), gradient(sequence_kl(THETA, REFERENCE)))


def test_peer_fault_12_token_level_k2_omits_the_effect_on_later_states():
    assert not close(leash("k2", "token"), gradient(sequence_kl(THETA, REFERENCE)))


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_peer_fault_12_same_gradient_before_and_after_the_policy_has_moved(estimator, level):
    """Samples of an older policy, reweighted, pull to where fresh ones would: at the states that it visited."""
    p, q = (REFERENCE, THETA) if estimator == "k3" else (THETA, REFERENCE)
    exact = sequence_kl(p, q) if level == "sequence" else token_kl(p, q, OLD)
    assert close(leash(estimator, level, old=OLD), gradient(exact))
    assert close(leash(estimator, level, old=THETA.detach()), leash(estimator, level))


def test_peer_fault_12_a_live_weight_is_exact_for_k1_and_k3_but_not_for_k2():
    exact = gradient(sequence_kl(THETA, REFERENCE))

    def live(estimator: str) -> Tensor:
        total = (logprobs_of(THETA) - logprobs_of(REFERENCE)).sum(1, keepdim=True)
        ratio = (logprobs_of(THETA) - logprobs_of(OLD)).sum(1, keepdim=True).exp()
        return gradient(expected(ratio * ESTIMATORS[estimator](total), OLD))

    assert close(live("k1"), exact)
    assert close(live("k3"), exact)
    assert not close(live("k2"), exact)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_sequence_level_terms_sum_to_the_estimate_of_the_sum(estimator):
    mask = torch.tensor([[True, False, True, False], [True, True, True, True], [False] * 4])
    d = torch.tensor([[1.0, math.nan, -3.0, 9.0], [0.5, 0.5, 0.5, 0.5], [math.nan] * 4])
    terms = kl_loss(d, torch.zeros_like(d), mask, estimator=estimator, level="sequence")
    wanted = ESTIMATORS[estimator](torch.tensor([-2.0, 2.0, 0.0]))
    torch.testing.assert_close(terms.sum(1), wanted)
    assert not terms[~mask].any()


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("extreme", [-100.0, 100.0])
def test_peer_fault_13_log_ratios_of_100_stay_finite(estimator, level, extreme):
    d = torch.full((1, 3), extreme, requires_grad=True)
    kl_loss(d, d, torch.ones(1, 3, dtype=torch.bool), estimator=estimator, level=level).sum().backward()
    assert d.grad is not None and d.grad.isfinite().all()
    assert ESTIMATORS[estimator](d).isfinite().all()


# --- the controller -----------------------------------------------------------------------------------


def trajectory(kl_above_baseline: float, steps: int, baseline: float = 0.3) -> list[float]:
    controller, state = AdaptiveKl(target=6.0, horizon_samples=1000), KlState(coefficient=0.04)
    state = controller.update(state, baseline, samples=50)
    coefficients = [state.coefficient]
    for _ in range(steps):
        state = controller.update(state, baseline + kl_above_baseline, samples=50)
        coefficients.append(state.coefficient)
    return coefficients


@pytest.mark.parametrize(
    ("kl", "error"),
    [(0.0, -0.2), (3.0, -0.2), (5.4, -0.1), (6.0, 0.0), (6.6, 0.1), (7.2, 0.2), (60.0, 0.2)],
)
def test_peer_fault_23_controller_follows_the_closed_form(kl, error):
    wanted = [0.04 * (1 + error * 50 / 1000) ** k for k in range(21)]
    assert trajectory(kl, 20) == pytest.approx(wanted, rel=1e-9)


def test_peer_fault_23_a_tight_leash_is_loosened_and_a_loose_one_tightened():
    assert trajectory(1.0, 1)[-1] < 0.04 < trajectory(20.0, 1)[-1]


def test_peer_fault_23_step_0_is_the_baseline():
    controller = AdaptiveKl(target=6.0, horizon_samples=1000)
    state = controller.update(KlState(0.04), measured=25.0, samples=50)  # a 4-bit reference
    assert state == KlState(0.04, baseline=25.0)
    assert controller.update(state, measured=31.0, samples=50).coefficient == pytest.approx(0.04)


def test_controller_state_survives_json():
    state = KlState(0.04, 0.3)
    assert KlState(**json.loads(json.dumps(asdict(state)))) == state


def test_a_horizon_too_short_for_the_step_is_refused():
    controller = AdaptiveKl(target=6.0, horizon_samples=10)
    assert controller.update(KlState(0.04), 1.0, samples=49).coefficient > 0
    with pytest.raises(ConfigError, match=r"kl\.horizon_samples = 10 .* steps of 50 samples: set it above 10"):
        controller.update(KlState(0.04), 1.0, samples=50)


def test_default_horizon_never_lets_the_coefficient_reach_zero():
    assert default_horizon(run_samples=12_800, samples_per_step=128) == 640
    assert default_horizon(run_samples=128, samples_per_step=128) == 128


@pytest.mark.parametrize("measured", [math.nan, math.inf])
def test_a_kl_that_is_not_finite_stops(measured):
    with pytest.raises(RunError, match="NaN or infinite log-probs"):
        AdaptiveKl(6.0, 1000).update(KlState(0.04), measured, 50)


def test_alarm_bands_are_above_the_step_0_value():
    state = KlState(0.04, baseline=2.0)
    assert [alarm(state, kl) for kl in (2.4, 2.6, 11.9, 12.1)] == ["low", None, None, "high"]
    assert alarm(KlState(0.04), 0.6) is None
