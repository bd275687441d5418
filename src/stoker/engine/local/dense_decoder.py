"""Decodes dense models on plain tensors: prompts packed, their keys kept once a group, rows come and go.

B rows, N prompt tokens in all, H query heads in K groups of G, D head dimension.
"""

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from stoker.engine.local.dense import Dense, Layer, few_rows, read_dense
from stoker.engine.local.group_cache import GroupCache

__all__ = ["DenseDecoder", "mismatch"]

_PREFILL_TOKENS = 8192
"""Prompt tokens computed at once, padding included: bounds memory whatever the number of prompts."""
_HEAD_ROWS, _HEAD_ROWS_TURNED = 1024, 4096
"""Vocabulary computed at once on CPU: MKL is up to a third slower on the whole of a tall matrix."""


class DenseDecoder:
    """`decoder.Decoder` for the models that `read_dense` knows."""

    continuous = True

    def __init__(self, dense: Dense, max_new_tokens: int, max_length: int) -> None:
        """`max_length`: the longest prompt with its answer, in tokens."""
        self._dense = dense
        self._tables = dense.tables(max_length)
        like = torch.empty(0, dense.key_value_heads, 0, dense.head_dim, dtype=dense.dtype, device=dense.device)
        self._cache = GroupCache(len(dense.layers), like, max_new_tokens)
        self._positions = torch.empty(0, dtype=torch.long, device=dense.device)  # (B,) of the last token fed
        self._ends: dict[tuple[int, ...], Tensor] = {}
        """Hidden state after each prompt: a row that enters later begins there."""
        self._windows = {layer.window for layer in dense.layers}

    def enter(self, prompts: Sequence[tuple[int, ...]]) -> Tensor:
        """A row for each prompt; hidden states after them, (rows entered, width)."""
        for some in _portions(self._cache.missing(prompts)):
            self._ends.update(zip(some, self._prefill(some), strict=True))
        self._cache.add_rows(prompts)
        ends = torch.tensor([len(prompt) - 1 for prompt in prompts], device=self._dense.device)
        self._positions = torch.cat([self._positions, ends])
        return torch.stack([self._ends[prompt] for prompt in prompts])

    def step(self, token_ids: Tensor) -> Tensor:
        """Append one token to each row, (B,); hidden states after it, (B, width)."""
        dense, cache = self._dense, self._cache
        self._positions = self._positions + 1
        turns = {kind: (cos[self._positions], sin[self._positions]) for kind, (cos, sin) in self._tables.items()}
        cache.begin_step(self._positions, self._windows)
        x = dense.embed(token_ids[:, None])[:, 0]
        for index, layer in enumerate(dense.layers):
            query, key, value = _heads(layer, x, turns[layer.rotary], dense.head_dim)
            grouped = query.view(len(x), dense.key_value_heads, -1, dense.head_dim)
            seen = cache.attend(index, layer, grouped, key, value)
            x = _rest(layer, x, seen.to(x.dtype).view(len(x), -1))
        return dense.norm(x)

    def keep(self, order: Sequence[int], upcoming: tuple[int, ...] | None) -> None:
        """Row i becomes what row order[i] was; rows left out are gone. `upcoming`: the next prompt to enter."""
        self._cache.keep(order, upcoming)
        self._positions = self._positions[torch.tensor(order, dtype=torch.long, device=self._dense.device)]
        self._ends = {prompt: end for prompt, end in self._ends.items() if not self._cache.missing([prompt])}

    def logits(self, hidden: Tensor) -> Tensor:
        """(B, width) -> (B, V)."""
        logits = _project(self._dense.head, hidden)
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
        beyond = {w: None if w is None or w >= width else places[:, None] - places >= w for w in self._windows}
        x = dense.embed(padded).view(count * width, -1)[spots]  # (N, width of the model)
        last = lengths.cumsum(0) - 1  # (prompts,) of the last tokens among the N
        for index, layer in enumerate(dense.layers):
            heads = _heads(layer, x, turns[layer.rotary], dense.head_dim)
            query, key, value = (_unpacked(part, spots, count, width) for part in heads)
            self._cache.write_prompts(index, entries, key, value)
            seen = _causal(query, key, value, layer.softcap, beyond[layer.window]).transpose(1, 2)
            flat = seen.reshape(count * width, -1)[spots]
            if index + 1 == len(dense.layers):  # beyond attention only the last tokens matter
                x, flat = x[last], flat[last]
            x = _rest(layer, x, flat)
        return dense.norm(x)


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


def _heads(layer: Layer, x: Tensor, turn: tuple[Tensor, Tensor], dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of tokens (N, width): queries (N, H, D), scaled, keys and values (N, K, D); queries and keys turned."""
    normed = layer.before_attention(x)
    query, key, value = (part(normed).view(len(x), -1, dim) for part in (layer.query, layer.key, layer.value))
    if layer.query_norm is not None and layer.key_norm is not None:
        query, key = layer.query_norm(query), layer.key_norm(key)
    cos, sin = turn[0][:, None], turn[1][:, None]
    return _turned(query, cos, sin) * layer.scale, _turned(key, cos, sin), value


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding; `sin` carries the sign that the first half of the dimensions takes."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)


def _rest(layer: Layer, x: Tensor, seen: Tensor) -> Tensor:
    """A layer after its attention: `seen` (N, H D) joins `x` (N, width), then the MLP."""
    seen = layer.output(seen)
    x = x + (seen if layer.after_attention is None else layer.after_attention(seen))
    normed = layer.before_mlp(x)
    mixed = layer.down(layer.activation(layer.gate(normed)) * layer.up(normed))
    return x + (mixed if layer.after_mlp is None else layer.after_mlp(mixed))


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


def _project(head: nn.Module, hidden: Tensor) -> Tensor:
    """The output head, in pieces where that is faster and nothing but a plain linear is asked for."""
    if type(head) is not nn.Linear or head.bias is not None or hidden.device.type != "cpu":
        return head(hidden)
    logits, turned = hidden.new_empty(len(hidden), head.out_features), few_rows(hidden)
    rows = _HEAD_ROWS_TURNED if turned else _HEAD_ROWS
    for start in range(0, head.out_features, rows):
        piece = slice(start, start + rows)
        if turned:
            logits[:, piece] = torch.mm(head.weight[piece], hidden.T).T
        else:
            torch.mm(hidden, head.weight[piece].T, out=logits[:, piece])
    return logits


def mismatch(model: PreTrainedModel) -> str | None:
    """Why this decoder can't be used for the model, as a clause; None: it can, its logits are transformers' own.

    Three short sequences, two of one prompt, are decoded and compared with plain forwards.
    """
    dense = read_dense(model)
    if isinstance(dense, str):
        return dense
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
