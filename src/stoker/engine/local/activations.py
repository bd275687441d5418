"""Activations within a limit of memory: as many layers as it takes are computed again in the backward pass.

The first layers are those: the backward pass comes to them last, when the others have let go of theirs, so that the
one layer which is whole again for a moment finds room. How many follows by arithmetic from a micro-batch's shape and
what each layer was measured to keep, never from free memory or time: a resume decides alike.

S lines, L the longest line, H hidden size.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from stoker.batch.saved import SavedTensors
from stoker.engine.local.critic import Critic
from stoker.engine.local.forward import ScoringModel
from stoker.engine.local.layout import Line, Microbatch, collate
from stoker.errors import ModelError
from stoker.rl.types import TrainRow

__all__ = ["ActivationLimit", "Bytes"]

GIB = 2**30
PROMPT, LONGEST_PROBE = 3, 63
"""Tokens of the lines that layers are measured with: odd, as most are, so that what kernels add for alignment shows."""


@dataclass(frozen=True)
class Bytes:
    """What is kept of a micro-batch: a part that grows with its tokens, and one with the pairs of a line's tokens
    (attention weights or masks, where a kernel keeps them).
    """

    per_token: float
    per_pair: float

    @classmethod
    def through(cls, found: dict[int, int]) -> "Bytes":
        """From the bytes of one short and one long line, by length.

        What doesn't grow at all would count as a negative part of the pairs, which long lines blow up: it is taken
        for a part of the tokens instead, a little too much.
        """
        (short, few), (long, many) = sorted(found.items())
        per_pair = max(0.0, (many / long - few / short) / (long - short))
        return cls(many / long - per_pair * long, per_pair)

    def of(self, lines: int, length: int) -> float:
        """Bytes of `lines` lines padded to `length` tokens."""
        return lines * length * (self.per_token + self.per_pair * length)


@dataclass(frozen=True)
class Cost:
    """One layer's activations: kept, or recomputed from its input."""

    kept: Bytes
    recomputed: Bytes


class ActivationLimit:
    """Holds the layers of one model to a number of bytes a micro-batch; without a limit it does nothing.

    Raises ModelError where the model's layers can't be recomputed one by one.
    """

    def __init__(self, model: Any, scorer: ScoringModel | Critic, gib: float | None) -> None:
        """`model`: of transformers, whole or a trunk. `scorer` runs its layers as an update does."""
        self._model: PreTrainedModel = model
        self._limit = math.inf if gib is None else gib * GIB
        self._costs: dict[bool, dict[nn.Module, Cost]] = {}  # by whether answers share a line: other kernels apply
        if gib is not None:
            layers = _layers(model)
            for answers in (1, 2) if scorer.sharing_width else (1,):
                self._costs[answers > 1] = _measure(model, layers, scorer, answers)

    @contextmanager
    def training(self) -> Iterator[None]:
        """Layers recompute in training mode alone, and nothing else hangs on it: dropout is 0."""
        self._model.train(bool(self._costs))
        try:
            yield
        finally:
            self._model.eval()

    def apply(self, micro: Microbatch, share: float) -> None:
        """Choose the layers that recompute in the next forward. `share`: the part of the limit that still holds."""
        if not self._costs:
            return
        lines, length = micro.token_ids.shape
        shared = micro.segments is not None
        count, _ = self.plan(lines, length, shared=shared, share=share)
        for place, layer in enumerate(self._costs[shared]):
            layer.gradient_checkpointing = place < count  # type: ignore[assignment]

    def plan(self, lines: int, length: int, *, shared: bool = False, share: float = 1.0) -> tuple[int, float]:
        """How many layers recompute in a micro-batch of S lines padded to L tokens, and the bytes that all keep."""
        costs = list(self._costs[shared].values())
        total, count = sum(cost.kept.of(lines, length) for cost in costs), 0
        while total > self._limit * share and count < len(costs):
            total += costs[count].recomputed.of(lines, length) - costs[count].kept.of(lines, length)
            count += 1
        return count, total

    def notes(self, tokens: int, longest: int, share: float = 1.0) -> list[str]:
        """What that share of the limit means for a full micro-batch of `tokens` in lines of `longest`, for the user."""
        if not self._costs:
            return []
        lines = max(1, tokens // longest)
        count, kept = self.plan(lines, longest, share=share)
        layers, limit = len(self._costs[False]), self._limit / GIB
        left = "" if share == 1 else f", of which lack of memory has left {share:.3g}"
        note = (
            f"update.activation_gib = {limit:g}{left}: {count} of {layers} layers of {type(self._model).__name__} "
            f"recompute in a micro-batch of {lines} x {longest} tokens, and {kept / GIB:.3g} GiB are kept"
        )
        if kept > self._limit * share > 0:
            note += "; lower update.tokens_per_microbatch to come below the limit"
        return [note]


def _layers(model: PreTrainedModel) -> list[nn.Module]:
    """The model's layers, made ready to recompute, none of them doing it yet."""
    layers = list(_outermost(model)) if model.supports_gradient_checkpointing else []
    if not layers:
        raise ModelError(
            f"update.activation_gib is set, but {type(model).__name__} can't recompute its layers one by one: leave "
            "the key out, and lower update.tokens_per_microbatch where memory is short"
        )
    for layer in layers:
        # Set by hand: transformers' own switch knows every n-th layer only, and makes embeddings require gradients.
        layer._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False)  # type: ignore[assignment]
    return layers


def _outermost(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        if isinstance(child, GradientCheckpointingLayer):
            yield child
        else:
            yield from _outermost(child)


def _measure(
    model: PreTrainedModel, layers: list[nn.Module], scorer: ScoringModel | Critic, answers: int
) -> dict[nn.Module, Cost]:
    """The cost of each layer, in the order in which they run, from one short line and one long line."""
    config = model.config.get_text_config()
    long = min(LONGEST_PROBE, getattr(config, "max_position_embeddings", None) or LONGEST_PROBE)
    found = {}
    for length in (long // 2, long):
        micro = _line(length, answers, config.vocab_size, model.device)
        found[length] = _scales(model, layers, partial(scorer, micro))
    return {
        layer: Cost(*(Bytes.through({n: parts[part].get(layer, 0) for n, parts in found.items()}) for part in (0, 1)))
        for layer in found[long][1]
    }


def _line(length: int, answers: int, vocabulary: int, device: torch.device) -> Microbatch:
    """A micro-batch of one line of `length` tokens: a prompt and so many answers."""
    fed = [len(part) for part in np.array_split(np.arange(length - PROMPT), answers)]
    ids = np.random.default_rng(0).integers(0, vocabulary, length + answers).astype(np.int32)
    rows = []
    for size in fed:
        blank = np.zeros(size + 1, dtype=np.float32)
        rows.append(TrainRow("", tuple(ids[:PROMPT].tolist()), ids[-size - 1 :], blank == 0, blank, blank, blank))
    return collate(rows, [Line(tuple(range(answers)), length)], device)


def _scales(
    model: nn.Module, layers: list[nn.Module], forward: Callable[[], Any]
) -> tuple[dict[nn.Module, int], dict[nn.Module, int]]:
    """The bytes that each layer keeps of a forward pass, and those of its input, layers in the order in which they run.

    Weights don't count, nor what all layers are given (mask, positions): recomputing doesn't free it.
    """
    inputs: dict[nn.Module, int] = {}

    def enter(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden, *others = (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
        inputs[layer] = inputs.get(layer, 0) + hidden.nbytes
        saved.give(others)

    handles = [layer.register_forward_pre_hook(enter, with_kwargs=True) for layer in layers]
    try:
        with (
            torch.enable_grad(),
            SavedTensors({layer: layer for layer in layers}, chain(model.parameters(), model.buffers())) as saved,
        ):
            scores = forward()
            kept = saved.count()
            del scores  # until here its graph holds what is counted
    finally:
        for handle in handles:
            handle.remove()
    return {layer: kept.get(layer, 0) for layer in layers}, inputs
