"""Decodes dense models on plain tensors: prompts packed, their keys kept once a group, rows come and go.

B rows, N prompt tokens in all, H query heads in K groups of G, D head dimension.
"""

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from stoker.engine.local.compiled_math import CompiledMath, uncompilable
from stoker.engine.local.compiler import Library
from stoker.engine.local.dense import Dense, Layer, Norm, read_dense
from stoker.engine.local.group_cache import GroupCache
from stoker.engine.local.step_math import StepMath, TorchMath, turned

__all__ = ["DenseDecoder", "mismatch"]

_PREFILL_TOKENS = 8192
"""Prompt tokens computed at once, padding included: bounds memory whatever the number of prompts."""


class DenseDecoder:
    """`decoder.Decoder` for the models that `read_dense` knows."""

    continuous = True

    def __init__(self, dense: Dense, max_new_tokens: int, max_length: int) -> None:
        """`max_length`: the longest prompt with its answer, in tokens."""
        self._dense = dense
        self._tables = dense.tables(max_length)
        like = torch.empty(0, dense.key_value_heads, 0, dense.head_dim, dtype=dense.dtype, device=dense.device)
        self._cache = GroupCache(len(dense.layers), like, max_new_tokens, upright=dense.library is not None)
        self._math: StepMath = (
            TorchMath(dense, self._cache, self._tables)
            if dense.library is None
            else CompiledMath(dense.library, dense, self._cache, self._tables)
        )
        self._ends: dict[tuple[int, ...], Tensor] = {}
        """Hidden state after each prompt: a row that enters later begins there."""

    def enter(self, prompts: Sequence[tuple[int, ...]]) -> Tensor:
        """A row for each prompt; hidden states after them, (rows entered, width)."""
        for some in _portions(self._cache.missing(prompts)):
            self._ends.update(zip(some, self._prefill(some), strict=True))
        self._cache.add_rows(prompts)
        return torch.stack([self._ends[prompt] for prompt in prompts])

    def step(self, token_ids: Tensor) -> Tensor:
        """Append one token to each row, (B,); hidden states after it, (B, width)."""
        dense, math = self._dense, self._math
        self._cache.next_column()
        math.begin_step()
        x = dense.embed(token_ids[:, None])[:, 0]
        if (whole := math.step(x)) is not None:
            return whole
        x, normed = math.add_norm(x, None, None, dense.norms[0])
        for index, layer in enumerate(dense.layers):
            seen = math.attend(index, *layer.heads(normed))
            x, normed = self._rest(layer, x, seen, dense.norms[index + 1])
        return normed

    def keep(self, order: Sequence[int], upcoming: tuple[int, ...] | None) -> None:
        """Row i becomes what row order[i] was; rows left out are gone. `upcoming`: the next prompt to enter."""
        self._cache.keep(order, upcoming)
        self._ends = {prompt: end for prompt, end in self._ends.items() if not self._cache.missing([prompt])}

    def logits(self, hidden: Tensor) -> Tensor:
        """(B, width) -> (B, V)."""
        (logits,) = self._dense.head(hidden)
        if self._dense.final_softcap is not None:
            logits = torch.tanh(logits / self._dense.final_softcap) * self._dense.final_softcap
        return logits

    def _prefill(self, prompts: Sequence[tuple[int, ...]]) -> Tensor:
        """Compute prompts and keep their keys and values; hidden states after each, (prompts, width)."""
        dense, device = self._dense, self._dense.device
        entries = self._cache.add_prompts(prompts)
        lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
        count, width = len(prompts), int(lengths.max())
        padded = torch.tensor([[*prompt, *[0] * (width - len(prompt))] for prompt in prompts], device=device)
        places = torch.arange(width, device=device)
        spots = (places < lengths[:, None]).view(-1).nonzero()[:, 0]  # (N,) of the real tokens in the padded rows
        turns = {k: (cos[spots % width], sin[spots % width]) for k, (cos, sin) in self._tables.items()}
        windows = {layer.window for layer in dense.layers}
        beyond = {w: None if w is None or w >= width else places[:, None] - places >= w for w in windows}
        x = dense.embed(padded).view(count * width, -1)[spots]  # (N, width of the model)
        x, normed = self._math.add_norm(x, None, None, dense.norms[0])
        last = lengths.cumsum(0) - 1  # (prompts,) of the last tokens among the N
        for index, layer in enumerate(dense.layers):
            query, key, value = layer.heads(normed)
            value = value.view(len(value), -1, dense.head_dim)
            heads = *turned(layer, query, key, turns[layer.rotary], dense.head_dim), value
            query, key, value = (_unpacked(part, spots, count, width) for part in heads)
            self._cache.write_prompts(index, entries, key, value)
            seen = _causal(query, key, value, layer.softcap, beyond[layer.window]).transpose(1, 2)
            flat = seen.reshape(count * width, -1)[spots]
            if index + 1 == len(dense.layers):  # beyond attention only the last tokens matter
                x, flat = x[last], flat[last]
            x, normed = self._rest(layer, x, flat, dense.norms[index + 1])
        return normed

    def _rest(self, layer: Layer, x: Tensor, seen: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
        """A layer after its attention: `seen` (N, H D) joins `x` (N, width), then the MLP; and the `norm` of that."""
        (output,) = layer.output(seen)
        x, normed = self._math.add_norm(x, output, layer.after_attention, layer.before_mlp)
        (mixed,) = layer.down(self._math.gate(layer, *layer.gate_up(normed)))
        return self._math.add_norm(x, mixed, layer.after_mlp, norm)


def _portions(prompts: Sequence[tuple[int, ...]]) -> Iterator[list[tuple[int, ...]]]:
    """Prompts in order, as many at once as fit `_PREFILL_TOKENS` when padded to the longest."""
    some: list[tuple[int, ...]] = []
    for prompt in prompts:
        width = max(map(len, [*some, prompt]))
        if some and width * (len(some) + 1) > _PREFILL_TOKENS:
            yield some
            some = []
        some.append(prompt)
    if some:
        yield some


def _unpacked(packed: Tensor, spots: Tensor, count: int, width: int) -> Tensor:
    """(N, heads, D) -> (prompts, heads, width, D)."""
    _, heads, dim = packed.shape
    if len(packed) < count * width:
        padded = packed.new_zeros(count * width, heads, dim)
        padded[spots] = packed
        packed = padded
    return packed.view(count, width, heads, dim).transpose(1, 2)


def _causal(query: Tensor, key: Tensor, value: Tensor, softcap: float | None, beyond: Tensor | None) -> Tensor:
    """Causal attention (prompts, H, T, D) of scaled queries; `beyond` (T, T): what a window leaves out besides."""
    groups, width = query.shape[1] // key.shape[1], query.shape[2]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    if softcap is None and beyond is None:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=1.0)
    seen = torch.ones(width, width, dtype=torch.bool, device=query.device).tril()
    if beyond is not None:
        seen &= ~beyond
    if softcap is None:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=seen, scale=1.0)
    scores = torch.tanh((query @ key.transpose(-1, -2)).float() / softcap) * softcap
    return scores.masked_fill(~seen, -torch.inf).softmax(-1).to(value.dtype) @ value


def mismatch(model: PreTrainedModel, library: Library | None = None) -> str | None:
    """Why this decoder can't be used for the model, as a clause; None: it can, its logits are transformers' own.

    Three short sequences, two of one prompt, are decoded and compared with plain forwards.
    """
    dense = read_dense(model, library)
    if isinstance(dense, str):
        return dense
    if library is not None and (reason := uncompilable(dense)):
        return reason
    generator = torch.Generator().manual_seed(0)
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    tokens = torch.randint(0, vocabulary, (3, 10), generator=generator).tolist()
    prompts = [tuple(tokens[0][:6]), tuple(tokens[1][:3]), tuple(tokens[1][:3])]
    fed = [tokens[0][6:10], tokens[1][3:7], tokens[2][3:7]]
    decoder = DenseDecoder(dense, max_new_tokens=5, max_length=11)
    found = [decoder.logits(decoder.enter(prompts))]
    for place in range(4):
        found.append(decoder.logits(decoder.step(torch.tensor([row[place] for row in fed], device=model.device))))
    for row, (prompt, answer) in enumerate(zip(prompts, fed, strict=True)):
        ids = torch.tensor([[*prompt, *answer]], device=model.device)
        expected = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 :].float()
        worst = (torch.stack([logits[row] for logits in found]).float() - expected).abs().max().item()
        # Rounding is relative to the largest logits; a wrong part changes them by about their size.
        allowed = max(1e-4, 16 * torch.finfo(dense.dtype).eps) * max(1.0, expected.abs().max().item())
        if not worst <= allowed and expected.isfinite().all():
            return f"its logits differ from stoker's own decoding by {worst:.2g}"
    return None
