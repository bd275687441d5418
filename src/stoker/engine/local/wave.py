"""One wave: samples with the same sampling parameters, decoded side by side until each has ended."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from stoker.engine.local.decoder import Decoder
from stoker.engine.local.distribution import Draws, draw
from stoker.engine.local.stopping import StopStrings, decode
from stoker.engine.local.uniforms import sample_keys, uniforms
from stoker.errors import RunError
from stoker.rl.types import KeptTokens, Request, Sample

__all__ = ["Wave"]

_COMPACT_AT = 0.75
"""Finished rows stay in the batch until live ones fall to this share: dropping them copies the whole cache."""


class Wave:
    """The answers of a wave as they grow. N samples, of which B rows are still in the decoder's batch."""

    def __init__(
        self,
        requests: Sequence[Request],
        tokenizer: PreTrainedTokenizerBase,
        stop_ids: Sequence[int],
        weight_version: int,
    ) -> None:
        self._requests = requests
        self._params = requests[0].params
        self._tokenizer = tokenizer
        self._stops = StopStrings(tokenizer, self._params.stop)
        self._stop_ids = np.array([*stop_ids, *self._stops.token_ids], np.int64)
        self._weight_version = weight_version
        self._keys = sample_keys(requests)  # (N,)
        count, limit = len(requests), self._params.max_new_tokens
        self._tokens = np.zeros((count, limit), np.int32)
        self._logprobs = np.zeros((count, limit), np.float32)
        self._lengths = np.full(count, limit)
        self._stopped = np.zeros(count, np.bool_)
        self._kept: list[list[NDArray[np.int32]]] = [[] for _ in requests]
        self._rows = np.arange(count)  # (B,) which sample each row of the batch is
        self._live = np.ones(count, np.bool_)  # (B,) False: finished, waiting to be dropped

    def run(self, decoder: Decoder, device: torch.device, progress: Callable[[int, int], None]) -> list[Sample]:
        """Draw every answer. `progress` is told (samples done, tokens drawn) after each token."""
        prompts = list(dict.fromkeys(request.prompt.token_ids for request in self._requests))
        places = {token_ids: place for place, token_ids in enumerate(prompts)}
        members = torch.tensor([places[request.prompt.token_ids] for request in self._requests], device=device)
        logits = decoder.prefill(prompts, self._params.max_new_tokens)[members]  # (B, V)
        decoder.select(members)
        drawn = 0
        for position in range(self._params.max_new_tokens):
            numbers = torch.from_numpy(uniforms(self._keys[self._rows], position))
            draws = draw(logits, numbers.to(device, torch.float32 if device.type == "mps" else None), self._params)
            drawn += int(self._live.sum())
            self._write(draws, position)
            progress(len(self._requests) - int(self._live.sum()), drawn)
            if not self._live.any() or position + 1 == self._params.max_new_tokens:
                break
            logits = decoder.step(self._compact(decoder, draws.token_ids))
        progress(len(self._requests), drawn)
        return [self._sample(n) for n in range(len(self._requests))]

    def _write(self, draws: Draws, position: int) -> None:
        """Take one token per live row and mark the rows that it ends."""
        rows, live = self._rows, self._live
        tokens = draws.token_ids.cpu().numpy()
        self._tokens[rows[live], position] = tokens[live]
        self._logprobs[rows[live], position] = draws.logprobs.cpu().numpy()[live]
        if draws.kept_ids is not None and draws.kept_counts is not None:
            kept, counts = draws.kept_ids.int().cpu().numpy(), draws.kept_counts.tolist()
            for b in np.flatnonzero(live):
                self._kept[rows[b]].append(kept[b, : counts[b]].copy())
        ended = live & np.isin(tokens, self._stop_ids)
        if self._stops:
            for b in np.flatnonzero(live & ~ended):
                ended[b] = self._stops.completed(self._tokens[rows[b], : position + 1])
        self._lengths[rows[ended]] = position + 1
        self._stopped[rows[ended]] = True
        self._live = live & ~ended

    def _compact(self, decoder: Decoder, token_ids: Tensor) -> Tensor:
        """Drop finished rows from the batch once they are many; the rows' tokens to go on with."""
        if self._live.sum() > _COMPACT_AT * len(self._live):
            return token_ids
        keep = np.flatnonzero(self._live)
        self._rows, self._live = self._rows[keep], self._live[keep]
        rows = torch.from_numpy(keep).to(token_ids.device)
        decoder.select(rows)
        return token_ids[rows]

    def _sample(self, n: int) -> Sample:
        request, length = self._requests[n], int(self._lengths[n])
        token_ids, logprobs = self._tokens[n, :length].copy(), self._logprobs[n, :length].copy()
        if np.isnan(logprobs).any():
            raise RunError(
                f"the model's logits are not finite after prompt {request.prompt.id} (sample {request.index}, token "
                f"{int(np.isnan(logprobs).argmax())}): its weights have diverged; resume from an earlier checkpoint "
                "with a lower optimizer.learning_rate."
            )
        answer = token_ids[:-1] if token_ids[-1] in self._stop_ids else token_ids
        return Sample(
            prompt=request.prompt,
            index=request.index,
            params=request.params,
            weight_version=self._weight_version,
            token_ids=token_ids,
            logprobs=logprobs,
            text=self._stops.cut(decode(self._tokenizer, answer)),
            finish="stop" if self._stopped[n] else "length",
            kept=_ragged(self._kept[n]) if self._kept[n] else None,
        )


def _ragged(rows: Sequence[NDArray[np.int32]]) -> KeptTokens:
    offsets = np.zeros(len(rows) + 1, np.int32)
    np.cumsum([len(row) for row in rows], out=offsets[1:])
    return KeptTokens(np.concatenate(rows), offsets)
