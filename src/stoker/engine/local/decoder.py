"""Runs a model over the rows of a wave: every prompt once, then one token per row and call.

U prompts, B rows (samples), V tokens of the vocabulary.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from stoker.engine.local.cache import Abilities, preallocated_cache

__all__ = ["Decoder", "make_decoder"]


class Decoder(Protocol):
    """Next-token logits for a changing set of rows."""

    def prefill(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> Tensor:
        """Logits after each prompt, (U, V)."""
        ...

    def select(self, rows: Tensor) -> None:
        """Go on with these rows, in this order; a row may be repeated (a group) or left out (finished)."""
        ...

    def step(self, token_ids: Tensor) -> Tensor:
        """Append one token to each row, (B,); logits after it, (B, V)."""
        ...


def make_decoder(model: PreTrainedModel, abilities: Abilities) -> Decoder:
    """The fastest decoder that is right for the model."""
    if abilities.cache_argument is None:
        return _RecomputingDecoder(model, abilities)
    return _CachedDecoder(model, abilities, abilities.cache_argument)


class _CachedDecoder:
    """Left-pads prompts, keeps their keys and values (or states), feeds one token at a time."""

    def __init__(self, model: PreTrainedModel, abilities: Abilities, cache_argument: str) -> None:
        self._model = model
        self._abilities = abilities
        self._argument = cache_argument
        self._spare = _spare_columns(model, abilities)
        self._cache: Cache | None = None
        self._mask: Tensor | None = None  # (B, prompt + max_new_tokens) 0 on padding; None: no padding anywhere
        self._positions = torch.empty(0)  # (B, 1) position of the last token fed
        self._length = 0

    def prefill(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> Tensor:
        device = self._model.device
        width = self._length = max(len(p) for p in prompts) + self._spare
        token_ids = torch.tensor([[0] * (width - len(p)) + list(p) for p in prompts], device=device)
        padding = torch.tensor([[width - len(p)] for p in prompts], device=device)
        places = torch.arange(width + max_new_tokens, device=device)
        if any(len(p) < width for p in prompts):  # never without `pads`: such prompts are equally long
            self._mask = (places >= padding).long()
        positions = (places[:width] - padding).clamp(min=0)
        self._positions = positions[:, -1:]
        if self._abilities.preallocated:
            self._cache = preallocated_cache(self._model.config, width + max_new_tokens)
        return self._forward(token_ids, positions)

    def select(self, rows: Tensor) -> None:
        assert self._cache is not None
        self._cache.reorder_cache(rows)  # type: ignore[arg-type]  # it wants a LongTensor, which no tensor's type says
        self._positions = self._positions[rows]
        if self._mask is not None:
            self._mask = self._mask[rows]

    def step(self, token_ids: Tensor) -> Tensor:
        self._length += 1
        self._positions = self._positions + 1
        return self._forward(token_ids[:, None], self._positions)

    def _forward(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        arguments: dict[str, Any] = {"use_cache": True}
        if self._cache is not None:
            arguments[self._argument] = self._cache
        if self._mask is not None:
            arguments["attention_mask"] = self._mask[:, : self._length]
        if self._abilities.position_ids:
            arguments["position_ids"] = positions
        if self._abilities.logits_to_keep:
            arguments["logits_to_keep"] = 1
        output = self._model(input_ids=token_ids, **arguments)
        if self._cache is None:  # the model's own, made by its first forward
            self._cache = getattr(output, self._argument)
        logits: Tensor = output.logits[:, -1]
        return logits


def _spare_columns(model: PreTrainedModel, abilities: Abilities) -> int:
    """Columns of padding that every row gets: one on CPU where heads share keys and values, else none.

    Without padding transformers drops the mask, and without a mask it takes a kernel for grouped heads that is
    five times slower on CPU than the masked one.
    """
    config = model.config.get_text_config(decoder=True)
    heads = getattr(config, "num_attention_heads", None)
    grouped = getattr(config, "num_key_value_heads", heads) != heads
    return int(abilities.pads and grouped and model.device.type == "cpu")


class _RecomputingDecoder:
    """For models without a cache: every token recomputes its whole past. Prompts must be equally long."""

    def __init__(self, model: PreTrainedModel, abilities: Abilities) -> None:
        self._model = model
        self._keep = {"logits_to_keep": 1} if abilities.logits_to_keep else {}
        self._token_ids = torch.empty(0)  # (B, prompt + tokens so far)

    def prefill(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> Tensor:
        self._token_ids = torch.tensor([list(p) for p in prompts], device=self._model.device)
        return self._forward()

    def select(self, rows: Tensor) -> None:
        self._token_ids = self._token_ids[rows]

    def step(self, token_ids: Tensor) -> Tensor:
        self._token_ids = torch.cat([self._token_ids, token_ids[:, None]], dim=1)
        return self._forward()

    def _forward(self) -> Tensor:
        logits: Tensor = self._model(input_ids=self._token_ids, use_cache=False, **self._keep).logits[:, -1]
        return logits
