"""Draws answers with the very module the learner trains: no second copy of the weights, nothing frozen.

Samples are decoded in waves of whole groups, at most `concurrent_samples` rows at once. Which samples share
a wave is decided by counts and submission order alone, never by time or free memory, so a resumed run
repeats the same batches bit for bit. Each prompt of a wave is computed once for all its samples.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from stoker.engine.local.cache import abilities_of
from stoker.engine.local.decoder import make_decoder
from stoker.engine.local.memory_errors import is_out_of_memory
from stoker.engine.local.stopping import stop_token_ids
from stoker.engine.local.wave import Wave
from stoker.errors import ModelError, RunError
from stoker.rl.types import Request, Sample

__all__ = ["LocalSampler", "next_wave"]


class LocalSampler:
    """`rl.ports.Sampler` on a transformers causal language model, CPU or one GPU."""

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, *, concurrent_samples: int) -> None:
        """Raises ModelError where the model can't be sampled from."""
        self.concurrent_samples = concurrent_samples
        self.notes: list[str] = []
        """What the user should know of how this model is sampled."""
        self.on_progress: Callable[[int, int, int], None] | None = None
        """Called at every token with (samples done, samples queued, tokens drawn) of this `collect`."""
        self._model = model
        self._tokenizer = tokenizer
        with _evaluating(model):
            self._abilities = abilities_of(model)
        self._stop_ids = stop_token_ids(model, tokenizer)
        self._queue: list[Request] = []
        self._weight_version = 0
        name = type(model).__name__
        if self._abilities.cache_argument is None:
            self.notes.append(f"{name} has no usable cache: each token recomputes its whole past, which is slow.")
        if not self._abilities.pads:
            self.notes.append(f"{name} can't be padded: only prompts of equal length are sampled together.")

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue samples. Raises ModelError, and queues none, where one can't be drawn."""
        for request in requests:
            self._check(request)
        self._queue.extend(requests)

    def collect(self) -> Iterator[Sample]:
        """Draw every queued sample; a wave's samples come in the order they were submitted."""
        done = tokens = 0
        try:
            while self._queue:
                wave, samples = self._next_samples(done, tokens)
                taken = set(wave)
                self._queue = [request for place, request in enumerate(self._queue) if place not in taken]
                done += len(samples)
                tokens += sum(len(sample.token_ids) for sample in samples)
                yield from samples
        finally:
            self._queue = []  # what an abandoned collect left would mix with the next step's samples

    def push(self, weight_version: int) -> None:
        """Later samples carry this version. The module is shared and no cache outlives its wave."""
        self._weight_version = weight_version

    def state(self) -> dict[str, Any]:
        return {"concurrent_samples": self.concurrent_samples}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.concurrent_samples = int(state["concurrent_samples"])

    def _next_samples(self, done: int, tokens: int) -> tuple[list[int], list[Sample]]:
        """Places in the queue and their samples; halves `concurrent_samples` until they fit in memory."""
        while True:
            wave = next_wave(self._queue, self.concurrent_samples, equal_lengths=not self._abilities.pads)
            requests = [self._queue[place] for place in wave]
            try:
                return wave, self._run(requests, done, tokens)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                cause = str(error).splitlines()[0] if str(error) else type(error).__name__
            # Only here is the failed wave's memory free: inside `except` the traceback holds its tensors.
            self._shrink(requests, cause)

    def _shrink(self, requests: Sequence[Request], cause: str) -> None:
        if len(requests) == 1:
            request = requests[0]
            raise RunError(
                f"out of memory while sampling one answer alone (prompt {request.prompt.id}: "
                f"{len(request.prompt.token_ids)} tokens and up to {request.params.max_new_tokens} new): {cause}. "
                "Lower sampling.max_new_tokens or task.max_prompt_tokens, or use model.dtype = 'bfloat16'."
            )
        self.concurrent_samples = len(requests) // 2
        self.notes.append(f"out of memory at {len(requests)} concurrent samples; going on with {len(requests) // 2}.")
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _run(self, requests: Sequence[Request], done: int, tokens: int) -> list[Sample]:
        queued = done + len(self._queue)
        report = self.on_progress

        def progress(wave_done: int, wave_tokens: int) -> None:
            if report is not None:
                report(done + wave_done, queued, tokens + wave_tokens)

        with _evaluating(self._model):
            wave = Wave(requests, self._tokenizer, self._stop_ids, self._weight_version)
            return wave.run(make_decoder(self._model, self._abilities), self._model.device, progress)

    def _check(self, request: Request) -> None:
        prompt, params = request.prompt, request.params
        if not prompt.token_ids:
            raise ModelError(f"prompt {prompt.id} has no tokens: a model needs at least one (e.g. its BOS token).")
        vocabulary, largest = self._model.config.get_text_config(decoder=True).vocab_size, max(prompt.token_ids)
        if largest >= vocabulary:
            raise ModelError(
                f"prompt {prompt.id} has token {largest}, but {type(self._model).__name__} knows {vocabulary}: its "
                "tokenizer is of another model, or tokens were added without resize_token_embeddings"
            )
        length, limit = len(prompt.token_ids) + params.max_new_tokens, self._abilities.max_positions
        if limit is not None and length > limit:
            raise ModelError(
                f"prompt {prompt.id} has {len(prompt.token_ids)} tokens, with sampling.max_new_tokens = "
                f"{params.max_new_tokens} that is {length}, but {type(self._model).__name__} holds {limit} positions: "
                f"lower sampling.max_new_tokens or task.max_prompt_tokens."
            )
        if not self._stop_ids and not params.stop:
            raise ModelError(
                "neither the tokenizer nor the model's generation config names an end-of-sequence token, so no "
                "answer could end before sampling.max_new_tokens: set sampling.stop, or eos_token_id in "
                "generation_config.json."
            )


def next_wave(queue: Sequence[Request], limit: int, *, equal_lengths: bool) -> list[int]:
    """Places in the queue to decode together: whole groups that match the first request, up to `limit` samples.

    A wave shares its sampling parameters (and its prompt length, where the model can't be padded). A group
    larger than `limit` is split. Depends on nothing but its arguments.
    """

    def kind(request: Request) -> tuple[Any, ...]:
        return request.params, len(request.prompt.token_ids) if equal_lengths else 0

    wanted = kind(queue[0])
    groups: dict[str, list[int]] = {}
    for place, request in enumerate(queue):
        if kind(request) == wanted:
            groups.setdefault(request.prompt.id, []).append(place)
    wave: list[int] = []
    for group in groups.values():
        if wave and len(wave) + len(group) > limit:
            break
        wave.extend(group[:limit])
    return wave


@contextmanager
def _evaluating(model: PreTrainedModel) -> Iterator[None]:
    """Evaluation mode without gradients; afterwards the model is as it was.

    no_grad, not inference_mode: a tensor made under inference_mode (a lazily built rotary table, say) could
    never enter the learner's autograd afterwards.
    """
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True
