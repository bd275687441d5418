"""Runs a model over rows of samples: every prompt once, then one token per row and call.

Dense models have a decoder of their own (`dense_decoder.py`). Every other model is called as transformers
defines it, which takes all rows at once and then only loses some: a wave.
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
    """Next-token logits for a changing set of rows. Features are whatever `logits` takes."""

    @property
    def continuous(self) -> bool:
        """Rows may enter beside others, and leave cheaply; else they enter an empty decoder, all at once."""
        ...

    def enter(self, prompts: Sequence[tuple[int, ...]]) -> Tensor:
        """Add a row for each prompt, behind the present ones; equal prompts are computed once. Features after them."""
        ...

    def step(self, token_ids: Tensor) -> Tensor:
        """Append one token to each row, (B,); features after it."""
        ...

    def keep(self, order: Sequence[int], upcoming: tuple[int, ...] | None) -> None:
        """Row i becomes what row order[i] was; the others are gone. `upcoming`: the prompt likely to enter next."""
        ...

    def logits(self, features: Tensor) -> Tensor:
        """(B, V)."""
        ...


def make_decoder(model: PreTrainedModel, abilities: Abilities, max_new_tokens: int) -> Decoder:
    """A decoder by way of transformers, for answers of up to `max_new_tokens`."""
    if abilities.cache_argument is None:
        return _RecomputingDecoder(model, abilities)
    return _CachedDecoder(model, abilities, abilities.cache_argument, max_new_tokens)


def _members(prompts: Sequence[tuple[int, ...]]) -> tuple[list[tuple[int, ...]], list[int]]:
    """Each prompt once, and which of them every row has."""
    places = {prompt: place for place, prompt in enumerate(dict.fromkeys(prompts))}
    return list(places), [places[prompt] for prompt in prompts]


class _CachedDecoder:
    """Left-pads prompts, keeps their keys and values (or states), feeds one token at a time."""

    continuous = False

    def __init__(self, model: PreTrainedModel, abilities: Abilities, cache_argument: str, max_new_tokens: int) -> None:
        self._model = model
        self._abilities = abilities
        self._max_new_tokens = max_new_tokens
        self._argument = cache_argument
        self._spare = _spare_columns(model, abilities)
        self._cache: Cache | None = None
        self._mask: Tensor | None = None  # (B, prompt + max_new_tokens) 0 on padding; None: no padding anywhere
        self._positions = torch.empty(0)  # (B, 1) position of the last token fed
        self._length = 0

    def enter(self, prompts: Sequence[tuple[int, ...]]) -> Tensor:
        distinct, members = _members(prompts)
        logits = self._prefill(distinct)
        self.keep(members, None)
        return logits[members]

    def _prefill(self, prompts: Sequence[tuple[int, ...]]) -> Tensor:
        """Logits after each prompt, (U, V)."""
        device, max_new_tokens = self._model.device, self._max_new_tokens
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

    def keep(self, order: Sequence[int], upcoming: tuple[int, ...] | None) -> None:
        assert self._cache is not None
        rows = torch.tensor(order, device=self._model.device)
        self._cache.reorder_cache(rows)  # type: ignore[arg-type]  # it wants a LongTensor, which no tensor's type says
        self._positions = self._positions[rows]
        if self._mask is not None:
            self._mask = self._mask[rows]

    def step(self, token_ids: Tensor) -> Tensor:
        self._length += 1
        self._positions = self._positions + 1
        return self._forward(token_ids[:, None], self._positions)

    def logits(self, features: Tensor) -> Tensor:
        return features

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

    continuous = False

    def __init__(self, model: PreTrainedModel, abilities: Abilities) -> None:
        self._model = model
        self._keep = {"logits_to_keep": 1} if abilities.logits_to_keep else {}
        self._token_ids = torch.empty(0)  # (B, prompt + tokens so far)

    def enter(self, prompts: Sequence[tuple[int, ...]]) -> Tensor:
        distinct, members = _members(prompts)
        self._token_ids = torch.tensor(distinct, device=self._model.device)
        logits = self._forward()
        self.keep(members, None)
        return logits[members]

    def keep(self, order: Sequence[int], upcoming: tuple[int, ...] | None) -> None:
        self._token_ids = self._token_ids[torch.tensor(order, device=self._model.device)]

    def logits(self, features: Tensor) -> Tensor:
        return features

    def step(self, token_ids: Tensor) -> Tensor:
        self._token_ids = torch.cat([self._token_ids, token_ids[:, None]], dim=1)
        return self._forward()

    def _forward(self) -> Tensor:
        logits: Tensor = self._model(input_ids=self._token_ids, use_cache=False, **self._keep).logits[:, -1]
        return logits
