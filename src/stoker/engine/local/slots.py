"""The samples being drawn side by side: what each has written, when it ends, and the Sample it becomes.

B rows, in the decoder's order; each has its own request, sampling parameters and number of tokens so far.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from stoker.engine.local.distribution import RowDraws
from stoker.engine.local.stopping import StopStrings, decode
from stoker.engine.local.uniforms import sample_keys, uniforms
from stoker.errors import RunError
from stoker.rl.types import KeptTokens, Request, Sample, SamplingParams

__all__ = ["Slots", "closed_up"]


class Slots:
    """Rows and their answers as they grow."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, stop_ids: Sequence[int], weight_version: int, max_new_tokens: int
    ) -> None:
        """`max_new_tokens`: the longest answer that any row to come may write."""
        self._tokenizer = tokenizer
        self._stop_ids = np.array(stop_ids, np.int64)
        self._weight_version = weight_version
        self._stops: dict[tuple[str, ...], StopStrings] = {}
        self.requests: list[Request] = []  # (B,)
        self._kept: list[list[NDArray[np.int32]]] = []  # (B,) the tokens that a cut left, by position
        self.live = np.empty(0, np.bool_)  # (B,) False: finished, waiting to be dropped
        self._keys = np.empty(0, np.uint64)  # (B,)
        self._limits = np.empty(0, np.int64)  # (B,)
        self._lengths = np.empty(0, np.int64)  # (B,) tokens so far
        self._tokens = np.empty((0, max_new_tokens), np.int32)
        self._logprobs = np.empty((0, max_new_tokens), np.float32)

    def enter(self, requests: Sequence[Request]) -> None:
        """Add a row for each request, behind the present ones."""
        count, width = len(requests), self._tokens.shape[1]
        self.requests.extend(requests)
        self._kept.extend([] for _ in requests)
        self.live = np.append(self.live, np.ones(count, np.bool_))
        self._keys = np.append(self._keys, sample_keys(requests))
        self._limits = np.append(self._limits, [request.params.max_new_tokens for request in requests])
        self._lengths = np.append(self._lengths, np.zeros(count, np.int64))
        self._tokens = np.concatenate([self._tokens, np.zeros((count, width), np.int32)])
        self._logprobs = np.concatenate([self._logprobs, np.zeros((count, width), np.float32)])

    def keep(self, order: NDArray[np.int64]) -> None:
        """Row i becomes what row order[i] was; the others are gone."""
        self.requests = [self.requests[row] for row in order]
        self._kept = [self._kept[row] for row in order]
        for name in ("live", "_keys", "_limits", "_lengths", "_tokens", "_logprobs"):
            setattr(self, name, getattr(self, name)[order])

    @property
    def params(self) -> list[SamplingParams]:
        return [request.params for request in self.requests]

    @property
    def tokens(self) -> int:
        """Tokens that live rows have drawn so far."""
        return int(self._lengths[self.live].sum())

    def uniforms(self) -> NDArray[np.float64]:
        """The number that each row's next draw is made with, (B,)."""
        return uniforms(self._keys, self._lengths)

    def last_tokens(self) -> torch.Tensor:
        """(B,) int64; a finished row repeats its last one."""
        return torch.from_numpy(self._tokens[np.arange(len(self._tokens)), self._lengths - 1].astype(np.int64))

    def write(self, draws: RowDraws) -> list[Sample]:
        """Take one token per live row; the samples that it ends."""
        rows = np.flatnonzero(self.live)
        tokens, places = draws.token_ids.cpu().numpy()[rows], self._lengths[rows]
        self._tokens[rows, places] = tokens
        self._logprobs[rows, places] = draws.logprobs.cpu().numpy()[rows]
        self._lengths[rows] += 1
        if draws.kept is not None:
            for row in rows:
                if (kept := draws.kept[row]) is not None:
                    self._kept[row].append(kept)
        stopped = np.isin(tokens, self._stop_ids)
        for n in np.flatnonzero(~stopped):
            if self.requests[rows[n]].params.stop:
                stopped[n] = self._stops_itself(int(rows[n]))
        ended = stopped | (self._lengths[rows] == self._limits[rows])
        self.live[rows[ended]] = False
        return [self._sample(int(row), bool(stop)) for row, stop in zip(rows[ended], stopped[ended], strict=True)]

    def _stop_strings(self, strings: tuple[str, ...]) -> StopStrings:
        if strings not in self._stops:
            self._stops[strings] = StopStrings(self._tokenizer, strings)
        return self._stops[strings]

    def _stops_itself(self, row: int) -> bool:
        """True where the row's own stop strings end it."""
        stops = self._stop_strings(self.requests[row].params.stop)
        written = self._tokens[row, : self._lengths[row]]
        return int(written[-1]) in stops.token_ids or (bool(stops) and stops.completed(written))

    def _sample(self, row: int, stopped: bool) -> Sample:
        request, length = self.requests[row], int(self._lengths[row])
        token_ids, logprobs = self._tokens[row, :length].copy(), self._logprobs[row, :length].copy()
        if np.isnan(logprobs.sum()):
            raise RunError(
                f"the model's logits are not finite after prompt {request.prompt.id} (sample {request.index}, token "
                f"{int(np.isnan(logprobs).argmax())}): its weights have diverged; resume from an earlier checkpoint "
                "with a lower optimizer.learning_rate."
            )
        last = int(token_ids[-1])
        stops = self._stop_strings(request.params.stop)
        closed = stopped and (last in self._stop_ids or last in stops.token_ids)
        return Sample(
            prompt=request.prompt,
            index=request.index,
            params=request.params,
            weight_version=self._weight_version,
            token_ids=token_ids,
            logprobs=logprobs,
            text=stops.cut(decode(self._tokenizer, token_ids[:-1] if closed else token_ids)),
            finish="stop" if stopped else "length",
            kept=_ragged(self._kept[row]) if self._kept[row] else None,
        )


def closed_up(live: NDArray[np.bool_]) -> NDArray[np.int64]:
    """The order that drops finished rows and moves as few as can be: gaps are filled from the end."""
    order = np.arange(int(live.sum()))
    order[~live[: len(order)]] = len(order) + np.flatnonzero(live[len(order) :])
    return order


def _ragged(rows: Sequence[NDArray[np.int32]]) -> KeptTokens:
    offsets = np.zeros(len(rows) + 1, np.int32)
    np.cumsum([len(row) for row in rows], out=offsets[1:])
    return KeptTokens(np.concatenate(rows), offsets)
