"""Draws answers with the very module the learner trains: no second copy of the weights, nothing frozen.

At most `concurrent_samples` rows are decoded side by side. With a decoder that allows it (dense models) a row
leaves when its sample has ended and the next one enters at once; else rows are decoded in waves of whole
groups. Which rows sit together follows from counts, submission order and what was drawn, never from time or
free memory, so a resumed run repeats the same batches bit for bit. A prompt is computed once for its group.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from stoker.batch.out_of_memory import is_out_of_memory
from stoker.engine.local.cache import abilities_of
from stoker.engine.local.compiler import Library, arithmetic, load_library
from stoker.engine.local.decoder import Decoder, make_decoder
from stoker.engine.local.dense import Dense, read_dense
from stoker.engine.local.dense_decoder import DenseDecoder, mismatch
from stoker.engine.local.drawing import Drawing, longest_first
from stoker.engine.local.slots import Slots
from stoker.engine.local.stopping import stop_token_ids
from stoker.errors import ModelError, RunError
from stoker.rl.types import Request, Sample

__all__ = ["LocalSampler"]


class LocalSampler:
    """`rl.ports.Sampler` on a transformers causal language model, CPU or one GPU."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        concurrent_samples: int,
        compiled: bool = True,
        measuring: bool = False,
    ) -> None:
        """`compiled`: decode with functions compiled for this CPU, where they serve the model. `measuring`: nothing but
        its length ends an answer, and a lack of memory surfaces. Raises ModelError where the model can't be sampled
        from.
        """
        self.concurrent_samples = self._configured = concurrent_samples
        self._measuring = measuring
        self.notes: list[str] = []
        """What the user should know of how this model is sampled."""
        self.on_progress: Callable[[int, int, int], None] | None = None
        """Called at every token with (samples done, samples queued, tokens drawn) of this `collect`."""
        self._model = model
        self._tokenizer = tokenizer
        with _evaluating(model):
            self._abilities = abilities_of(model)
            unfit = mismatch(model)
            self._library = self._compile() if compiled and unfit is None else None
        self._dense = unfit is None
        self._stop_ids = stop_token_ids(model, tokenizer)
        self._queue: list[Request] = []
        self._lengths: dict[str, float] = {}
        """By prompt id, the mean answer of its last samples, in tokens."""
        self._weight_version = 0
        name = type(model).__name__
        if unfit:
            self._say_general(unfit)
        if self._abilities.cache_argument is None:
            self.notes.append(f"{name} has no usable cache: each token recomputes its whole past, which is slow.")
        if not self._abilities.pads:
            self.notes.append(f"{name} can't be padded: only prompts of equal length are sampled together.")

    @property
    def arithmetic(self) -> str:
        """What computes a token."""
        return arithmetic(self._library)

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue samples. Raises ModelError, and queues none, where one can't be drawn."""
        vocabulary = self._model.config.get_text_config(decoder=True).vocab_size
        for request in requests:
            self._check(request, vocabulary)
        self._queue.extend(requests)

    def collect(self) -> Iterator[Sample]:
        """Draw every queued sample, each given as it ends. The weights must not change meanwhile."""
        requests, self._queue = longest_first(self._queue, self._lengths), []
        longest = max((request.params.max_new_tokens for request in requests), default=0)
        stop_ids = () if self._measuring else self._stop_ids
        slots = Slots(self._tokenizer, stop_ids, self._weight_version, longest)
        equal_lengths = not self._abilities.pads
        drawing = Drawing(requests, self._new_decoder, slots, self._model.device, waves_of_equal_lengths=equal_lengths)
        drawn: dict[str, list[int]] = {}
        while drawing.unfinished:
            for sample in self._next_samples(drawing, len(requests)):
                drawn.setdefault(sample.prompt.id, []).append(len(sample.token_ids))
                yield sample
        self._lengths.update({prompt: sum(lengths) / len(lengths) for prompt, lengths in drawn.items()})

    def push(self, weight_version: int) -> None:
        """Later samples carry this version. The module is shared and no cache outlives its `collect`."""
        self._weight_version = weight_version

    def state(self) -> dict[str, Any]:
        return {
            "concurrent_samples": self.concurrent_samples,
            "configured": self._configured,
            "answer_lengths": dict(self._lengths),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        if state["configured"] == self._configured:  # else the run file has a new number, which counts
            self.concurrent_samples = int(state["concurrent_samples"])
        self._lengths = dict(state["answer_lengths"])

    def _next_samples(self, drawing: Drawing, queued: int) -> list[Sample]:
        """Draw until a sample has ended; halves `concurrent_samples` until the rows fit in memory."""
        while drawing.unfinished:
            try:
                with _evaluating(self._model):
                    ended: list[Sample] = []
                    while not ended:
                        ended = drawing.advance(self.concurrent_samples)
                        if self.on_progress is not None:
                            self.on_progress(drawing.done, queued, drawing.tokens)
                return ended
            except (RuntimeError, MemoryError) as error:
                if self._measuring or not is_out_of_memory(error):
                    raise
                cause = str(error).splitlines()[0] if str(error) else type(error).__name__
            # Only here is the failed rows' memory free: inside `except` the traceback holds its tensors.
            if requests := drawing.in_flight:
                self._shrink(requests, cause)
            elif not drawing.holds_samples:
                raise RunError(
                    f"out of memory before the first token was drawn: {cause}. Lower sampling.max_new_tokens or "
                    "task.max_prompt_tokens, or use model.dtype = 'bfloat16'."
                )
            drawing.start_over()
        return []

    def _new_decoder(self, requests: Sequence[Request]) -> Decoder:
        longest = max(request.params.max_new_tokens for request in requests)
        if self._dense:
            dense = read_dense(self._model, self._library)
            if isinstance(dense, Dense):
                length = max(len(request.prompt.token_ids) + request.params.max_new_tokens for request in requests)
                return DenseDecoder(dense, longest, length)
            self._dense = False
            self._say_general(dense)
        return make_decoder(self._model, self._abilities, longest)

    def _compile(self) -> Library | None:
        """The compiled functions, where they give the model's logits."""
        if self._model.device.type != "cpu":
            return None
        library = load_library()
        reason = library if isinstance(library, str) else mismatch(self._model, library)
        if isinstance(library, str) or reason:
            self.notes.append(
                f"decoding by PyTorch's operators instead of compiled functions, which is slower: {reason}."
            )
            return None
        if library.seconds:
            self.notes.append(f"compiled functions for this processor in {library.seconds:.1f} s, once.")
        return library

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

    def _say_general(self, reason: str) -> None:
        name = type(self._model).__name__
        self.notes.append(f"{name} is sampled through transformers' own modules, which is slower: {reason}.")

    def _check(self, request: Request, vocabulary: int) -> None:
        prompt, params = request.prompt, request.params
        if not prompt.token_ids:
            raise ModelError(f"prompt {prompt.id} has no tokens: a model needs at least one (e.g. its BOS token).")
        largest = max(prompt.token_ids)
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
        if not (self._stop_ids or params.stop or self._measuring):
            raise ModelError(
                "neither the tokenizer nor the model's generation config names an end-of-sequence token, so no "
                "answer could end before sampling.max_new_tokens: set sampling.stop, or eos_token_id in "
                "generation_config.json."
            )


@contextmanager
def _evaluating(model: PreTrainedModel) -> Iterator[None]:
    """Evaluation mode without gradients; afterwards the model is as it was.

    no_grad, not inference_mode: a tensor made under inference_mode (a lazily built rotary table, say) could
    never enter the learner's autograd afterwards.
    """
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        with torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True
