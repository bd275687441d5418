"""Chunked token scores against plain autograd on the whole logits."""

import pytest
import torch
from torch import Tensor

from stoker.engine.local import chunked
from stoker.engine.local.chunked import Head, Kept, scores_of_logits, token_scores

N, H, V = 7, 5, 11


def inputs(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    hidden = torch.randn(N, H, dtype=dtype, requires_grad=True)
    weight = torch.randn(V, H, dtype=dtype, requires_grad=True)
    bias = torch.randn(V, dtype=dtype, requires_grad=True)
    temperature = torch.linspace(0.5, 1.5, N, dtype=dtype)
    return hidden, weight, bias, torch.randint(V, (N,)), temperature


def some_kept(targets: Tensor) -> tuple[Kept, Tensor]:
    """Row 3 cuts nothing (empty set); the others keep the target and two more."""
    keep = torch.zeros(N, V, dtype=torch.bool)
    for row in range(N):
        if row == 3:
            continue
        keep[row, targets[row]] = keep[row, row] = keep[row, row + 2] = True
    ids = torch.cat([keep[row].nonzero()[:, 0] for row in range(N)])
    offsets = torch.tensor([0, *keep.sum(1).cumsum(0)])
    keep[3] = True
    return Kept(ids, offsets), keep


def plain(
    hidden: Tensor, head: Head, targets: Tensor, temperature: Tensor, keep: Tensor | None
) -> tuple[Tensor, Tensor]:
    logits = hidden @ head.weight.T + (0 if head.bias is None else head.bias)
    logits = logits * head.scale
    if head.softcap:
        logits = head.softcap * torch.tanh(logits / head.softcap)
    logits = logits / temperature[:, None]
    full = logits.log_softmax(-1)
    entropy = -(full.exp() * full).sum(-1)
    cut = full if keep is None else logits.masked_fill(~keep, -torch.inf).log_softmax(-1)
    return cut.gather(1, targets[:, None])[:, 0], entropy


@pytest.mark.parametrize("truncated", [False, True])
@pytest.mark.parametrize("chunk", [1, 3, 7, 100])
@pytest.mark.parametrize(("scale", "softcap"), [(1.0, 0.0), (0.3, 2.0)])
def test_values_and_gradients_equal_plain_autograd(
    truncated: bool, chunk: int, scale: float, softcap: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunked, "TILE_ELEMENTS", 2 * V)  # two rows a tile: tiles and chunks interleave
    hidden, weight, bias, targets, temperature = inputs()
    head = Head(weight, bias, scale, softcap)
    kept, keep = some_kept(targets) if truncated else (None, None)
    ours = token_scores(hidden, head, targets, temperature, kept, chunk)
    theirs = plain(hidden, head, targets, temperature, keep)
    torch.manual_seed(1)
    factors = torch.randn(2, N, dtype=torch.float64)
    for value, expected in zip((ours.logprobs, ours.entropy), theirs, strict=True):
        torch.testing.assert_close(value, expected)
    leaves = (hidden, weight, bias)
    found = torch.autograd.grad((factors * torch.stack([ours.logprobs, ours.entropy])).sum(), leaves)
    expected_grads = torch.autograd.grad((factors * torch.stack(theirs)).sum(), leaves)
    for one, other in zip(found, expected_grads, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("truncated", [False, True])
def test_gradcheck(truncated: bool) -> None:
    hidden, weight, bias, targets, temperature = inputs()
    kept = some_kept(targets)[0] if truncated else None

    def scores(h: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        out = token_scores(h, Head(w, b, 0.7, 3.0), targets, temperature, kept, chunk=3)
        return out.logprobs, out.entropy

    assert torch.autograd.gradcheck(scores, (hidden, weight, bias))


def test_backward_through_one_output_only() -> None:
    hidden, weight, _, targets, temperature = inputs(torch.float32)
    head = Head(weight)
    (found,) = torch.autograd.grad(token_scores(hidden, head, targets, temperature, chunk=2).logprobs.sum(), hidden)
    (expected,) = torch.autograd.grad(plain(hidden, head, targets, temperature, None)[0].sum(), hidden)
    torch.testing.assert_close(found, expected)


def test_bfloat16_softmax_runs_in_fp32_and_weight_gradient_adds_up_wide() -> None:
    """Chunks of one position: rounding the running sum to bf16 each time would lose far more than one rounding."""
    torch.manual_seed(0)
    hidden = torch.randn(512, 8).bfloat16().requires_grad_()
    weight = torch.randn(16, 8).bfloat16().requires_grad_()
    targets, temperature = torch.randint(16, (512,)), torch.ones(512)
    scores = token_scores(hidden, Head(weight), targets, temperature, chunk=4)
    assert scores.logprobs.dtype == torch.float32
    (found,) = torch.autograd.grad(scores.logprobs.sum(), weight)
    wide_h, wide_w = hidden.detach().float(), weight.detach().float().requires_grad_()
    (expected,) = torch.autograd.grad(plain(wide_h, Head(wide_w), targets, temperature, None)[0].sum(), wide_w)
    assert (found.float() - expected).norm() / expected.norm() < 0.01


def test_extreme_logits_stay_finite() -> None:
    hidden = torch.tensor([[300.0], [-300.0]], requires_grad=True)
    weight = torch.tensor([[1.0], [0.0], [-1.0]])
    out = token_scores(hidden, Head(weight), torch.tensor([2, 2]), torch.ones(2))
    (out.logprobs + out.entropy).sum().backward()
    torch.testing.assert_close(out.logprobs.detach(), torch.tensor([-600.0, 0.0]))
    assert hidden.grad is not None and bool(hidden.grad.isfinite().all())


@pytest.mark.parametrize("truncated", [False, True])
def test_scores_of_ready_logits_are_the_same(truncated: bool) -> None:
    hidden, weight, _, targets, temperature = inputs()
    kept = some_kept(targets)[0] if truncated else None
    one = token_scores(hidden, Head(weight), targets, temperature, kept)
    other = scores_of_logits(hidden @ weight.T, targets, temperature, kept)
    torch.testing.assert_close(one.logprobs, other.logprobs)
    torch.testing.assert_close(one.entropy, other.entropy)
    grads = [torch.autograd.grad((s.logprobs * s.entropy).sum(), (hidden, weight)) for s in (one, other)]
    for found, expected in zip(*grads, strict=True):
        torch.testing.assert_close(found, expected)
