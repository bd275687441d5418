"""One `collect`: requests waiting, rows being drawn, samples done; a token for every row at a time."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from stoker.engine.local.decoder import Decoder
from stoker.engine.local.distribution import draw_rows
from stoker.engine.local.slots import Slots, closed_up
from stoker.rl.types import Request, Sample

__all__ = ["Drawing", "longest_first", "next_wave"]

_COMPACT_AT = 0.75
"""Of a wave, finished rows stay until live ones fall to this share: dropping them copies the whole cache."""


class Drawing:
    """Draws requests in the order given, as the decoder allows."""

    def __init__(
        self,
        requests: Sequence[Request],
        new_decoder: Callable[[Sequence[Request]], Decoder],
        slots: Slots,
        device: torch.device,
        *,
        waves_of_equal_lengths: bool,
    ) -> None:
        """`new_decoder` makes an empty decoder for (at least) these requests."""
        self._requests = requests
        self._new_decoder = new_decoder
        self._slots = slots
        self._device = device
        self._equal_lengths = waves_of_equal_lengths
        self._waiting = list(range(len(requests)))
        self._places: list[int] = []  # (B,) which request each row is of
        self._decoder: Decoder | None = None
        self._ended: list[Sample] = []
        """Not given to the caller yet: closing up behind them may run out of memory."""
        self.done = 0
        """Samples."""
        self._done_tokens = 0

    @property
    def unfinished(self) -> bool:
        return bool(self._waiting or self._places or self._ended)

    @property
    def holds_samples(self) -> bool:
        """Samples have ended that the caller hasn't been given."""
        return bool(self._ended)

    @property
    def tokens(self) -> int:
        """Drawn so far."""
        return self._done_tokens + self._slots.tokens

    @property
    def in_flight(self) -> list[Request]:
        """Requests whose samples are being drawn, in the order given."""
        return [self._requests[place] for place in self._live_places()]

    def advance(self, limit: int) -> list[Sample]:
        """Let requests enter while there are fewer than `limit` rows, draw a token for every row; samples that end."""
        if self._ended:
            return self._hand_over()
        if self._decoder is None:
            self._decoder = self._new_decoder([self._requests[place] for place in self._waiting])
        entering = self._entering(self._decoder, limit)
        features = [self._decoder.step(self._slots.last_tokens().to(self._device))] if self._places else []
        if entering:
            entered = set(entering)
            self._waiting = [place for place in self._waiting if place not in entered]
            self._places.extend(entering)
            requests = [self._requests[place] for place in entering]
            self._slots.enter(requests)
            features.append(self._decoder.enter([request.prompt.token_ids for request in requests]))
        logits = self._decoder.logits(features[0] if len(features) == 1 else torch.cat(features))
        numbers = torch.from_numpy(self._slots.uniforms())
        wide = self._device.type != "mps"  # which has no float64
        draws = draw_rows(logits, numbers.to(self._device, None if wide else torch.float32), self._slots.params)
        ended = self._slots.write(draws)
        self._ended += ended
        self.done += len(ended)
        self._done_tokens += sum(len(sample.token_ids) for sample in ended)
        self._close_up(self._decoder)
        return self._hand_over()

    def start_over(self) -> None:
        """Forget what rows have drawn and let their requests wait again; frees the decoder's memory."""
        self._waiting = sorted([*self._waiting, *self._live_places()])
        self._leave(np.empty(0, np.int64))
        self._decoder = None

    def _hand_over(self) -> list[Sample]:
        ended, self._ended = self._ended, []
        return ended

    def _live_places(self) -> list[int]:
        return sorted(place for place, live in zip(self._places, self._slots.live, strict=True) if live)

    def _entering(self, decoder: Decoder, limit: int) -> list[int]:
        if decoder.continuous:
            return self._waiting[: max(0, limit - len(self._places))]
        if self._places:
            return []
        waiting = [self._requests[place] for place in self._waiting]
        return [self._waiting[n] for n in next_wave(waiting, limit, equal_lengths=self._equal_lengths)]

    def _close_up(self, decoder: Decoder) -> None:
        live = self._slots.live
        if live.all() or (not decoder.continuous and live.sum() > _COMPACT_AT * len(live)):
            return
        order = closed_up(live)
        if len(order) or decoder.continuous:
            upcoming = self._requests[self._waiting[0]].prompt.token_ids if self._waiting else None
            decoder.keep(order.tolist(), upcoming)
        else:
            self._decoder = None  # the wave has ended
        self._leave(order)

    def _leave(self, order: NDArray[np.int64]) -> None:
        self._slots.keep(order)
        self._places = [self._places[row] for row in order]


def longest_first(requests: Sequence[Request], lengths: Mapping[str, float]) -> list[Request]:
    """Whole groups, those likely to grow longest first, so that few rows are left running at the end.

    `lengths`: the mean answer of a prompt when it was last drawn, in tokens, by its id. A prompt that wasn't counts
    as long as its answers may be. Among equals the order given.
    """
    groups: dict[str, list[Request]] = {}
    for request in requests:
        groups.setdefault(request.prompt.id, []).append(request)

    def expected(group: list[Request]) -> float:
        limit = max(request.params.max_new_tokens for request in group)
        return min(limit, lengths.get(group[0].prompt.id, limit))

    return [request for group in sorted(groups.values(), key=expected, reverse=True) for request in group]


def next_wave(waiting: Sequence[Request], limit: int, *, equal_lengths: bool) -> list[int]:
    """Places among the waiting to decode together: whole groups in order, up to `limit` samples.

    A wave shares its prompt length where the model can't be padded. A group larger than `limit` is split.
    Depends on nothing but its arguments.
    """
    groups: dict[str, list[int]] = {}
    for place, request in enumerate(waiting):
        if not equal_lengths or len(request.prompt.token_ids) == len(waiting[0].prompt.token_ids):
            groups.setdefault(request.prompt.id, []).append(place)
    wave: list[int] = []
    for group in groups.values():
        if wave and len(wave) + len(group) > limit:
            break
        wave.extend(group[:limit])
    return wave
