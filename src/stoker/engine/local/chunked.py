"""Log-probs and entropy of chosen tokens without ever holding all vocabulary logits.

N positions, H hidden size, V vocabulary. For position i with temperature tau_i the scores are

    u = scale * (W h_i + b);   u = cap * tanh(u / cap) where the model has a softcap;   z = u / tau_i

    log p~(y) = z_y - logsumexp(z over the kept ids)   the sampled distribution; all ids without top-k / top-p
    H = logsumexp(z) - sum(p z)                        entropy of the full distribution, nats

Matrix products run on `chunk` positions at a time in the compute dtype; the softmax runs in fp32 on
row tiles small enough to stay in cache (on a CPU it would otherwise cost more than the products).
The backward pass recomputes the logits of every chunk but the last, which it finds kept.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["Head", "Kept", "Scores", "scores_of_logits", "token_scores"]

TILE_ELEMENTS = 1 << 20
"""fp32 scores of one tile on a CPU: 4 MB, about a cache's worth; fewer, larger tiles on an accelerator."""


@dataclass(frozen=True)
class Head:
    """The last linear map of a causal model, with the two transforms that some put after it."""

    weight: Tensor  # (V, H)
    bias: Tensor | None = None  # (V,)
    scale: float = 1.0
    softcap: float = 0.0
    """0: none."""


@dataclass(frozen=True)
class Kept:
    """Kept token ids of N positions, ragged: position i owns ids[offsets[i]:offsets[i + 1]]. Empty: nothing was cut."""

    ids: Tensor  # (M,) int64
    offsets: Tensor  # (N + 1,) int64, on the CPU: tiles are cut by it


@dataclass(frozen=True)
class Scores:
    """One value a position, fp32 (fp64 for fp64 models)."""

    logprobs: Tensor  # (N,) of the target under the sampled (truncated) distribution
    entropy: Tensor  # (N,) of the full distribution


def token_scores(
    hidden: Tensor, head: Head, targets: Tensor, temperature: Tensor, kept: Kept | None = None, chunk: int = 1024
) -> Scores:
    """Scores of targets (N,) given hidden states (N, H) and temperatures (N,); differentiable in hidden, weight, bias.

    A target must be in its kept set: it was drawn from it.
    """
    return Scores(*_TokenScores.apply(hidden, head.weight, head.bias, targets, temperature, kept, chunk, head))


def _accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _tiles(start: int, stop: int, vocabulary: int, device: torch.device) -> list[tuple[int, int]]:
    elements = TILE_ELEMENTS if device.type == "cpu" else 64 * TILE_ELEMENTS
    rows = max(1, elements // vocabulary)
    return [(low, min(low + rows, stop)) for low in range(start, stop, rows)]


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """(n, V) in the compute dtype, before scale, softcap and temperature."""
    return torch.nn.functional.linear(hidden, weight, bias)


def _scaled(logits: Tensor, head: Head, temperature: Tensor) -> tuple[Tensor, Tensor | None]:
    """z (n, V) in fp32, and tanh(u / cap) where there is a softcap (its backward needs it)."""
    z = logits.to(_accumulation_dtype(logits.dtype), copy=True)
    if head.softcap:
        bent = z.mul_(head.scale / head.softcap).tanh_()
        return bent * (head.softcap / temperature)[:, None], bent
    return z.mul_((head.scale / temperature)[:, None]), None


def _kept_slice(kept: Kept, low: int, high: int) -> tuple[Tensor, Tensor, Tensor]:
    """Row of the tile and id of each kept token (m,), and how many each row keeps (n,)."""
    counts = (kept.offsets[low + 1 : high + 1] - kept.offsets[low:high]).to(kept.ids.device)
    rows = torch.repeat_interleave(torch.arange(high - low, device=kept.ids.device), counts)
    return rows, kept.ids[int(kept.offsets[low]) : int(kept.offsets[high])], counts


def _kept_logsumexp(z: Tensor, rows: Tensor, ids: Tensor, counts: Tensor, full: Tensor) -> Tensor:
    """(n,) logsumexp over each row's kept ids; the full one where a row cut nothing."""
    values = z[rows, ids]
    peak = torch.full_like(full, -torch.inf).scatter_reduce(0, rows, values.detach(), "amax")
    total = (counts == 0).to(full.dtype).index_add(0, rows, (values - peak[rows]).exp())  # 1 for an empty row: log is 0
    return torch.where(counts > 0, peak + total.log(), full)


class _TokenScores(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: Tensor,
        kept: Kept | None,
        chunk: int,
        head: Head,
    ) -> tuple[Tensor, Tensor]:
        count = hidden.shape[0]
        out = hidden.new_zeros((4, count), dtype=_accumulation_dtype(hidden.dtype))
        logits = hidden.new_zeros((0, weight.shape[0]))
        for start in range(0, count, chunk):
            stop = min(start + chunk, count)
            logits = _logits(hidden[start:stop], weight, bias)
            for low, high in _tiles(start, stop, weight.shape[0], hidden.device):
                z, _ = _scaled(logits[low - start : high - start], head, temperature[low:high])
                _reduce(z, targets[low:high], kept, low, high, out)
        ctx.save_for_backward(hidden, weight, bias, targets, temperature, out)
        ctx.last_logits = logits if any(ctx.needs_input_grad[:3]) else None
        ctx.kept, ctx.chunk, ctx.head = kept, chunk, head
        return out[0].clone(), out[1].clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, on_logprobs: Tensor, on_entropy: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, temperature, out = ctx.saved_tensors
        logits, ctx.last_logits = ctx.last_logits, None
        count, vocabulary = hidden.shape[0], weight.shape[0]
        wide = _accumulation_dtype(hidden.dtype)
        grad_hidden = torch.empty_like(hidden)
        grad_weight: Tensor | None = None
        grad_bias = hidden.new_zeros(vocabulary, dtype=wide) if ctx.needs_input_grad[2] else None
        bonus = on_entropy if bool(on_entropy.any()) else None  # without one a tile's work is halved
        for start in reversed(range(0, count, ctx.chunk)):
            stop = min(start + ctx.chunk, count)
            if logits is None:
                logits = _logits(hidden[start:stop], weight, bias)
            for low, high in _tiles(start, stop, vocabulary, hidden.device):
                tile = logits[low - start : high - start]
                z, bent = _scaled(tile, ctx.head, temperature[low:high])
                slope = _slope(z, targets[low:high], ctx.kept, low, high, out, on_logprobs, bonus)
                slope.mul_((ctx.head.scale / temperature[low:high])[:, None])
                if bent is not None:
                    slope.mul_(bent.square_().neg_().add_(1))
                tile.copy_(slope)  # the logits' memory now holds their gradient
            torch.mm(logits, weight, out=grad_hidden[start:stop])
            if ctx.needs_input_grad[1]:
                part = logits.t() @ hidden[start:stop]
                # One chunk needs no wide copy; several add up in fp32 so that the sum isn't rounded each time.
                grad_weight = part if grad_weight is None else grad_weight.to(wide).add_(part)
            if grad_bias is not None:
                grad_bias.add_(logits.sum(0, dtype=wide))
            logits = None
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(weight.dtype),
            *(None,) * 5,
        )


def _reduce(z: Tensor, targets: Tensor, kept: Kept | None, low: int, high: int, out: Tensor) -> None:
    """Fill out[:, low:high] from scores z (n, V): log p~, entropy, logsumexp, logsumexp over the kept ids."""
    peak = z.amax(1)
    # logsumexp and sum(p z) share one exponential; the shift by the peak keeps it finite.
    powers = (z - peak[:, None]).exp_()
    total = powers.sum(1)
    normaliser = peak + total.log()
    kept_normaliser = normaliser if kept is None else _kept_logsumexp(z, *_kept_slice(kept, low, high), normaliser)
    out[0, low:high] = z.gather(1, targets[:, None])[:, 0] - kept_normaliser
    out[1, low:high] = normaliser - torch.linalg.vecdot(powers, z) / total
    out[2, low:high] = normaliser
    out[3, low:high] = kept_normaliser


def _slope(
    z: Tensor,
    targets: Tensor,
    kept: Kept | None,
    low: int,
    high: int,
    out: Tensor,
    on_logprobs: Tensor,
    on_entropy: Tensor | None,
) -> Tensor:
    """d loss / d z (n, V), in z's memory where it can be.

    d log p~(y)/dz = onehot(y) - p~;   dH/dz = -p (log p + H).
    """
    entropy, normaliser, kept_normaliser = out[1, low:high], out[2, low:high], out[3, low:high]
    on_target = on_all = on_logprobs[low:high]
    cut = None
    if kept is not None:
        rows, ids, counts = _kept_slice(kept, low, high)
        cut = (rows, ids), -on_target[rows] * (z[rows, ids] - kept_normaliser[rows]).exp()
        on_all = torch.where(counts > 0, 0.0, on_target)
    z.sub_(normaliser[:, None])  # log p
    factor = -on_all[:, None]
    if on_entropy is not None:
        factor = (z + entropy[:, None]).mul_(-on_entropy[low:high, None]).add_(factor)
    slope = z.exp_().mul_(factor)
    if cut is not None:
        slope.index_put_(*cut, accumulate=True)
    return slope.scatter_add_(1, targets[:, None], on_target[:, None])


def scores_of_logits(logits: Tensor, targets: Tensor, temperature: Tensor, kept: Kept | None = None) -> Scores:
    """The same scores from ready logits (N, V), by plain autograd: for models whose head can't be taken apart."""
    z = logits.to(_accumulation_dtype(logits.dtype)) / temperature[:, None]
    log_p = z.log_softmax(1)
    entropy = -torch.linalg.vecdot(log_p.exp(), log_p)
    chosen = log_p.gather(1, targets[:, None])[:, 0]
    if kept is None:
        return Scores(chosen, entropy)
    # In terms of log p the full logsumexp is 0, so subtracting the kept one renormalises.
    normaliser = _kept_logsumexp(log_p, *_kept_slice(kept, 0, len(targets)), torch.zeros_like(chosen))
    return Scores(chosen - normaliser, entropy)
