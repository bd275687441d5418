import math
from dataclasses import fields, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from stoker.errors import ConfigError, RunError
from stoker.rl.losses import LOSSES, SURROGATES, Terms, evaluate, surrogate
from stoker.rl.types import Objective

LEAVES = ("logprobs", "entropy", "values")
POLICY = Objective("policy")
FULL = Objective("policy", kl_coefficient=0.1, entropy_coefficient=0.01)


def row(*numbers: float, grad: bool = False) -> Tensor:
    return torch.tensor([numbers], dtype=torch.float64, requires_grad=grad)


def random_terms(seed: int = 0, shape: tuple[int, int] = (3, 5)) -> Terms:
    """Every field filled, a third of the tokens masked, leaves ready for a gradient."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        field.name: torch.randn(shape, generator=generator, dtype=torch.float64)
        for field in fields(Terms)
        if field.name != "mask"
    }
    for name in LEAVES:
        tensors[name].requires_grad_()
    return Terms(mask=torch.rand(shape, generator=generator) < 2 / 3, **tensors)


def gradients(terms: Terms, objective: Objective) -> list[Tensor]:
    """Of the summed loss with respect to log-probs, entropy and values (0 where unused)."""
    loss, _ = evaluate(terms, objective)
    leaves = [getattr(terms, name) for name in LEAVES]
    found = torch.autograd.grad(loss.sum(), leaves, allow_unused=True)
    return [torch.zeros_like(leaf) if grad is None else grad for leaf, grad in zip(leaves, found, strict=True)]


def on(logprobs: Tensor, **given: Tensor) -> Terms:
    return Terms(mask=torch.ones_like(logprobs, dtype=torch.bool), logprobs=logprobs, **given)


# --- policy -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope", "clipped"),
    [
        (1.5, 1.0, -1.3, 0.0, 1.0),  # enough of a good thing: clip_high = 0.3
        (0.5, 1.0, -0.5, -0.5, 0.0),
        (0.5, -1.0, 0.8, 0.0, 1.0),  # enough of a bad one: clip_low = 0.2
        (1.5, -1.0, 1.5, 1.5, 0.0),
        (1.0, 2.0, -2.0, -2.0, 0.0),
    ],
)
def test_clipped_surrogate_by_hand(ratio, advantage, loss, slope, clipped):
    logprobs = row(math.log(ratio), grad=True)
    terms = on(logprobs, old_logprobs=row(0.0), advantages=row(advantage))
    found, metrics = evaluate(terms, Objective("policy", clip_low=0.2, clip_high=0.3))
    found.sum().backward()
    assert found.item() == pytest.approx(loss)
    assert logprobs.grad is not None and logprobs.grad.item() == pytest.approx(slope)  # d ratio / d logp = ratio
    assert metrics["ratio"].item() == pytest.approx(ratio)
    assert metrics["clip_fraction"].item() == clipped
    assert metrics["approx_kl"].item() == pytest.approx(ratio - 1 - math.log(ratio))


def test_without_old_logprobs_the_ratio_is_one_and_the_gradient_is_reinforce():
    logprobs = row(-1.0, -2.0, grad=True)
    loss, metrics = evaluate(on(logprobs, advantages=row(3.0, -4.0)), Objective("policy"))
    loss.sum().backward()
    assert logprobs.grad is not None and logprobs.grad.tolist() == [[-3.0, 4.0]]
    assert metrics["ratio"].tolist() == [[1.0, 1.0]]


def test_kl_and_entropy_terms_by_hand():
    terms = on(row(-1.0), advantages=row(0.0), reference_logprobs=row(-3.0), entropy=row(0.7))
    loss, metrics = evaluate(terms, Objective("policy", kl_coefficient=0.5, entropy_coefficient=0.1))
    assert loss.item() == pytest.approx(0.5 * 2.0**2 / 2 - 0.1 * 0.7)
    assert metrics["kl_loss"].item() == pytest.approx(2.0)
    assert metrics["reference_kl"].item() == pytest.approx(2.0)
    assert metrics["entropy"].item() == pytest.approx(0.7)


def test_mismatch_compares_the_sampler_with_the_trainer_that_sampled():
    terms = on(row(-9.0), old_logprobs=row(-1.0), sampler_logprobs=row(-1.5), advantages=row(1.0))
    _, metrics = evaluate(terms, Objective("policy"))
    assert metrics["mismatch_abs"].item() == pytest.approx(0.5)
    assert metrics["mismatch_kl"].item() == pytest.approx(math.exp(0.5) - 1 - 0.5)
    _, unmoved = evaluate(replace(terms, old_logprobs=None), Objective("policy"))
    assert unmoved["mismatch_abs"].item() == pytest.approx(7.5)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope"),
    [
        (2.9, -1.0, 2.9, 2.9),  # below the second clip
        (4.0, -1.0, 3.0, 0.0),  # a bad token already grown: never more than 3 |A|
        (4.0, 1.0, -1.2, 0.0),  # good ones have the first clip
        (0.5, -1.0, 0.8, 0.0),
    ],
)
def test_dual_clip_by_hand(ratio, advantage, loss, slope):
    logprobs = row(math.log(ratio), grad=True)
    found, _ = evaluate(on(logprobs, old_logprobs=row(0.0), advantages=row(advantage)), replace(POLICY, dual_clip=3.0))
    found.sum().backward()
    assert found.item() == pytest.approx(loss)
    assert logprobs.grad.item() == pytest.approx(slope)


@pytest.mark.parametrize(("ratio", "advantage"), [(1.0, 2.0), (30.0, 1.0), (0.1, -1.0)])
def test_reinforce_is_not_clipped(ratio, advantage):
    logprobs = row(math.log(ratio), grad=True)
    terms = on(logprobs, old_logprobs=row(0.0), advantages=row(advantage))
    found, metrics = evaluate(terms, replace(POLICY, surrogate="reinforce"))
    found.sum().backward()
    assert found.item() == logprobs.grad.item() == pytest.approx(-ratio * advantage)
    assert "clip_fraction" not in metrics


@pytest.mark.parametrize(
    ("ratio", "advantage", "weight", "clipped"),
    [(2.0, 1.0, 2.0, 0), (9.0, 1.0, 5.0, 1), (9.0, -1.0, 5.0, 1), (0.01, 1.0, 0.5, 1), (0.6, -1.0, 0.6, 0)],
)
def test_cispo_clips_the_weight_and_keeps_the_gradient(ratio, advantage, weight, clipped):
    logprobs = row(math.log(ratio), grad=True)
    terms = on(logprobs, old_logprobs=row(0.0), advantages=row(advantage))
    found, metrics = evaluate(terms, replace(POLICY, surrogate="cispo", clip_low=0.5, clip_high=4.0))
    found.sum().backward()
    assert found.item() == pytest.approx(-weight * advantage * math.log(ratio))
    assert logprobs.grad.item() == pytest.approx(-weight * advantage)
    assert metrics["clip_fraction"].item() == clipped


@pytest.mark.parametrize(
    ("ratio", "advantage", "tau"), [(1.0, 1.0, 2.0), (1.7, 1.0, 2.0), (1.7, -0.5, 3.0), (0.2, -1.0, 3.0)]
)
def test_sapo_by_hand(ratio, advantage, tau):
    logprobs = row(math.log(ratio), grad=True)
    terms = on(logprobs, old_logprobs=row(0.0), advantages=row(advantage))
    found, _ = evaluate(terms, replace(POLICY, surrogate="sapo", gate_positive=2.0, gate_negative=3.0))
    found.sum().backward()
    gate = 1 / (1 + math.exp(-tau * (ratio - 1)))
    assert found.item() == pytest.approx(-4 / tau * gate * advantage)
    assert logprobs.grad.item() == pytest.approx(-4 * gate * (1 - gate) * ratio * advantage)  # -A at ratio 1


def test_gspo_by_hand():
    """s = (prod ratios)^(1/T); each row's loss is -min(s A, clip(s) A), its gradient -s A / T a token."""
    ratios, A = [1.2, 0.9, 1.1], 2.0
    logprobs = torch.tensor(
        [[*map(math.log, ratios), 7.0], [0.5, 0.5, 0.5, 9.0]], dtype=torch.float64, requires_grad=True
    )
    mask = torch.tensor([[True, True, True, False]] * 2)
    terms = Terms(mask, logprobs, old_logprobs=torch.zeros(2, 4), advantages=torch.full((2, 4), A))
    loss, metrics = evaluate(terms, replace(POLICY, ratio="sequence", clip_low=0.3, clip_high=0.4))
    (loss / 3).sum().backward()  # a mean over each row's three tokens
    s = math.prod(ratios) ** (1 / 3)
    torch.testing.assert_close(loss[0, :3], torch.full((3,), -s * A, dtype=torch.float64))
    torch.testing.assert_close(logprobs.grad[0, :3], torch.full((3,), -s * A / 3, dtype=torch.float64))
    torch.testing.assert_close(loss[1, :3], torch.full((3,), -1.4 * A, dtype=torch.float64))  # s = e^0.5 is clipped
    assert not logprobs.grad[1].any() and not logprobs.grad[:, 3].any()
    assert metrics["clip_fraction"].tolist() == [[0, 0, 0, 0], [1, 1, 1, 0]]
    assert metrics["approx_kl"][0, 1].item() == pytest.approx(0.9 - 1 - math.log(0.9))  # of tokens all the same


OWN = """
import torch

def squared(terms, log_ratio, objective):
    return -(terms.advantages * log_ratio.exp() - objective.clip_high).square()

def scalar(terms, log_ratio, objective):
    return log_ratio.sum()


def raises(terms, log_ratio, objective):
    return terms.advantage


def greedy(terms, log_ratio, objective):
    raise MemoryError


def constant(terms, log_ratio, objective):
    return terms.advantages
"""


def test_a_users_own_loss_by_path(tmp_path):
    file = tmp_path / "own.py"
    file.write_text(OWN)
    terms = on(row(math.log(2.0)), old_logprobs=row(0.0), advantages=row(3.0), entropy=row(0.7))
    loss, _ = evaluate(terms, Objective("policy", surrogate=f"{file}:squared", clip_high=1.0, entropy_coefficient=0.1))
    assert loss.item() == pytest.approx(-25.0 - 0.07)
    with pytest.raises(RunError, match=r"returned shape \(\): a tensor of shape \(1, 1\) is needed"):
        evaluate(terms, Objective("policy", surrogate=f"{file}:scalar"))
    with pytest.raises(
        RunError, match=r"raises' raised\n(.|\n)*terms.advantage\n(.|\n)*no attribute 'advantage'"
    ) as told:
        evaluate(terms, Objective("policy", surrogate=f"{file}:raises"))
    assert "losses.py" not in str(told.value)  # the user's lines, not stoker's
    with pytest.raises(MemoryError):  # the learner tries again with smaller micro-batches
        evaluate(terms, Objective("policy", surrogate=f"{file}:greedy"))
    constant = Objective("policy", surrogate=f"{file}:constant")
    assert evaluate(terms, constant)[0].item() == 3.0  # no gradient is asked for here
    with pytest.raises(RunError, match=r"loss '.*:constant' returned a tensor without a gradient"):
        evaluate(replace(terms, logprobs=row(0.0, grad=True)), constant)
    with pytest.raises(ConfigError, match=r"algorithm.loss .* has no 'square'"):
        surrogate(f"{file}:square")


# --- value and sft ------------------------------------------------------------------------------------


def value_terms(value: float, old: float, target: float) -> Terms:
    return Terms(torch.ones(1, 1, dtype=torch.bool), values=row(value), old_values=row(old), returns=row(target))


@pytest.mark.parametrize(
    ("value", "old", "target", "clip", "loss"),
    [
        (3.0, 0.0, 1.0, 0.0, 2.0),  # not clipped: 4 / 2
        (0.1, 0.0, 1.0, 0.2, 0.405),  # inside the clip
        (0.9, 0.0, 1.0, 0.2, 0.32),  # moved too far: counted as 0.2, (0.8)^2 / 2
        (-2.0, 0.0, 1.0, 0.2, 4.5),  # worse than its clip: the larger error counts
    ],
)
def test_value_loss_by_hand(value, old, target, clip, loss):
    objective = Objective("value", value_clip=clip)
    found, metrics = evaluate(value_terms(value, old, target), objective)
    assert found.item() == pytest.approx(loss)
    assert metrics["value_error"].item() == pytest.approx((value - target) ** 2)
    doubled, _ = evaluate(value_terms(value, old, target), replace(objective, value_coefficient=2.0))
    assert doubled.item() == pytest.approx(2 * loss)


def test_sft_is_the_negative_log_likelihood():
    loss, metrics = evaluate(on(row(-1.0, -0.5)), Objective("sft"))
    assert loss.tolist() == metrics["nll"].tolist() == [[1.0, 0.5]]


# --- faults -------------------------------------------------------------------------------------------


OBJECTIVES = {
    **{loss: replace(FULL, loss=loss, value_clip=0.2) for loss in LOSSES},
    **{
        f"{name} by {ratio}": replace(FULL, surrogate=name, ratio=ratio, dual_clip=2.0)
        for name in SURROGATES
        for ratio in ("token", "sequence")
    },
}


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("poison", [math.nan, math.inf, 1e30])
def test_peer_fault_20_nothing_leaks_through_the_mask(name, level, poison):
    objective = replace(OBJECTIVES[name], kl_level=level)
    clean = random_terms()
    poisoned = {
        field.name: torch.where(clean.mask, getattr(clean, field.name).detach(), poison)
        for field in fields(Terms)
        if field.name != "mask"
    }
    for name in LEAVES:
        poisoned[name].requires_grad_()
    dirty = Terms(mask=clean.mask, **poisoned)
    (wanted, wanted_metrics), (found, metrics) = evaluate(clean, objective), evaluate(dirty, objective)
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)
    assert not found[~clean.mask].any()
    for name, metric in metrics.items():
        torch.testing.assert_close(metric, wanted_metrics[name], rtol=0, atol=0)
        assert not metric[~clean.mask].any() and not metric.requires_grad
    for found_grad, wanted_grad in zip(gradients(dirty, objective), gradients(clean, objective), strict=True):
        torch.testing.assert_close(found_grad, wanted_grad, rtol=0, atol=0)
        assert not found_grad[~clean.mask].any()


@pytest.mark.parametrize("loss", OBJECTIVES)
@pytest.mark.parametrize("extreme", [-100.0, 100.0])
def test_peer_fault_13_every_loss_stays_finite_far_from_the_old_policy(loss, extreme):
    terms = replace(random_terms(), old_logprobs=torch.full((3, 5), extreme))
    found, metrics = evaluate(terms, OBJECTIVES[loss])
    assert found.isfinite().all()
    assert all(metric.isfinite().all() for metric in metrics.values())
    assert all(grad.isfinite().all() for grad in gradients(terms, OBJECTIVES[loss]))


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("name", ["old_logprobs", "reference_logprobs", "sampler_logprobs"])
@pytest.mark.parametrize("extreme", [-100.0, 100.0])
def test_peer_fault_13_extreme_log_ratios_keep_loss_and_gradient_finite(estimator, level, name, extreme):
    objective = replace(FULL, kl_estimator=estimator, kl_level=level)
    terms = replace(random_terms(), **{name: torch.full((3, 5), extreme)})
    loss, metrics = evaluate(terms, objective)
    assert loss.isfinite().all()
    assert all(metric.isfinite().all() for metric in metrics.values())
    assert all(grad.isfinite().all() for grad in gradients(terms, objective))


@pytest.mark.parametrize(
    ("objective", "changed"),
    [
        (Objective("policy"), {"clip_low": 0.9}),
        (Objective("policy"), {"clip_high": 5.0}),
        (Objective("policy"), {"kl_coefficient": 0.1}),
        (Objective("policy"), {"entropy_coefficient": 0.1}),
        (POLICY, {"dual_clip": 1.3}),
        (POLICY, {"ratio": "sequence"}),
        (POLICY, {"surrogate": "reinforce"}),
        (POLICY, {"surrogate": "cispo"}),
        (POLICY, {"surrogate": "sapo"}),
        (replace(POLICY, surrogate="cispo"), {"clip_low": 0.9}),
        (replace(POLICY, surrogate="cispo"), {"clip_high": 5.0}),
        (replace(POLICY, surrogate="sapo"), {"gate_positive": 2.0}),
        (replace(POLICY, surrogate="sapo"), {"gate_negative": 2.0}),
        (replace(POLICY, surrogate="sapo"), {"entropy_coefficient": 0.1}),
        (replace(POLICY, surrogate="reinforce"), {"kl_coefficient": 0.1}),
        (FULL, {"kl_coefficient": 0.2}),
        (FULL, {"kl_estimator": "k3"}),
        (FULL, {"kl_level": "sequence"}),
        (FULL, {"entropy_coefficient": 0.02}),
        (Objective("value"), {"value_coefficient": 0.5}),
        (Objective("value"), {"value_clip": 0.2}),
    ],
)
def test_peer_fault_24_each_weight_changes_the_gradient(objective, changed):
    before = gradients(random_terms(), objective)
    after = gradients(random_terms(), replace(objective, **changed))
    assert any(not torch.equal(a, b) for a, b in zip(before, after, strict=True)), changed


@pytest.mark.parametrize(
    ("objective", "missing"),
    [
        (FULL, "reference_logprobs"),
        (FULL, "entropy"),
        (FULL, "advantages"),
        (replace(POLICY, surrogate="cispo"), "advantages"),
        (replace(POLICY, surrogate="sapo"), "advantages"),
        (replace(POLICY, surrogate="reinforce"), "advantages"),
        (Objective("value", value_clip=0.2), "old_values"),
        (Objective("value"), "returns"),
        (Objective("sft"), "logprobs"),
    ],
)
def test_a_missing_term_is_named_not_assumed(objective, missing):
    with pytest.raises(RunError, match=f"needs {missing}"):
        evaluate(replace(random_terms(), **{missing: None}), objective)


@given(st.permutations(range(4)), st.sampled_from(sorted(OBJECTIVES)))
def test_peer_fault_17_metrics_follow_their_rows_under_permutation(order, name):
    terms, objective = random_terms(shape=(4, 6)), replace(OBJECTIVES[name], kl_level="sequence")
    moved = Terms(**{field.name: getattr(terms, field.name)[list(order)] for field in fields(Terms)})
    (loss_before, before), (loss_after, after) = evaluate(terms, objective), evaluate(moved, objective)
    torch.testing.assert_close(loss_before[list(order)], loss_after)
    for name in before:
        torch.testing.assert_close(before[name][list(order)], after[name])
        torch.testing.assert_close(before[name].sum(), after[name].sum())


def test_a_loss_that_is_not_zero_at_zero_is_masked_too(monkeypatch):
    monkeypatch.setitem(
        LOSSES, "shifted", lambda terms, objective: (terms.need("logprobs") + 1, {"one": terms.need("logprobs") + 1})
    )
    terms = Terms(torch.tensor([[True, False]]), logprobs=row(-3.0, math.nan))
    loss, metrics = evaluate(terms, Objective("shifted"))
    assert loss.tolist() == metrics["one"].tolist() == [[-2.0, 0.0]]


def test_half_precision_is_widened():
    terms = Terms(torch.ones(1, 2, dtype=torch.bool), logprobs=torch.tensor([[-1.0, -2.0]], dtype=torch.bfloat16))
    assert evaluate(terms, Objective("sft"))[0].dtype == torch.float32
