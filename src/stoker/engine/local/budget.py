"""The token budget of a micro-batch, which halves when memory runs out."""

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch

from stoker.batch.out_of_memory import is_out_of_memory
from stoker.batch.pack import pack, padded_tokens
from stoker.engine.local.layout import Line, lines_of
from stoker.errors import RunError
from stoker.record.memory import peak_resident_bytes
from stoker.rl.types import TrainRow

__all__ = ["TokenBudget", "peak_bytes"]

T = TypeVar("T")

OVERHEAD_ON_CPU, OVERHEAD_ELSEWHERE = 64, 1024
"""What one more micro-batch costs, in tokens' time: on a CPU its calls, and gradients that are added up once
more; an accelerator idles through a small one."""


def peak_bytes(device: torch.device) -> int:
    """Most memory that PyTorch held on a GPU since the last call; on a CPU, that the process ever had."""
    if device.type != "cuda":
        return peak_resident_bytes()
    peak = torch.cuda.max_memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    return peak


class TokenBudget:
    """Cuts rows into micro-batches of at most `tokens` padded tokens; remembers what it learned of memory."""

    def __init__(self, tokens: int, device: torch.device, *, shrinks: bool = True) -> None:
        """`shrinks`: False lets a lack of memory surface, for whoever looks for the limit."""
        self._shrinks = shrinks
        self.configure(tokens)
        self._overhead = OVERHEAD_ON_CPU if device.type == "cpu" else OVERHEAD_ELSEWHERE
        self.notes: list[str] = []
        self._in_flight = (0, 0)  # rows and padded tokens of the micro-batch at work

    def configure(self, tokens: int) -> None:
        """Begin again with so many; what was learned of memory is forgotten."""
        self.tokens = self._configured = tokens

    @property
    def share(self) -> float:
        """What lack of memory has left of the budget; 1: all."""
        return self.tokens / self._configured

    def microbatches(self, rows: Sequence[TrainRow], sharing_width: int) -> Iterator[list[Line]]:
        """Lines of each micro-batch (see `layout.lines_of`); a row longer than the budget gets one of its own."""
        lines = lines_of(rows, self.tokens, sharing_width)
        lengths = [line.length for line in lines]
        for places in pack(lengths, self.tokens, oversized="alone", overhead=self._overhead):
            chosen = [lines[place] for place in places]
            self._in_flight = (sum(len(line.rows) for line in chosen), padded_tokens(lengths, [places]))
            yield chosen

    def retry(self, attempt: Callable[[], T], undo: Callable[[], None]) -> T:
        """Run `attempt` until it fits, halving the budget and calling `undo` after each lack of memory.

        Raises RunError where a single row doesn't fit. Other errors pass through, and all where it doesn't shrink.
        """
        while True:
            try:
                return attempt()
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                if not self._shrinks:
                    undo()
                    raise
            # Outside `except`: the traceback would keep the failed micro-batch's tensors alive.
            undo()
            self._shrink()

    def state(self) -> dict[str, Any]:
        return {"tokens_per_microbatch": self.tokens, "configured": self._configured}

    def restore(self, state: Mapping[str, Any]) -> None:
        """What was learned of memory holds where the run file still has the same number; a new one counts."""
        if state["configured"] == self._configured:
            self.tokens = int(state["tokens_per_microbatch"])

    def _shrink(self) -> None:
        rows, tokens = self._in_flight
        if rows <= 1:
            raise RunError(
                f"memory ran out in a micro-batch of one row of {tokens} tokens, so it can't be cut further: set "
                "update.activation_gib = 0, lower update.logits_per_chunk, or shorten "
                "sampling.max_new_tokens or task.max_prompt_tokens"
            )
        before, self.tokens = self.tokens, max(1, min(self.tokens, tokens) // 2)
        self.notes.append(f"memory ran out at {tokens} padded tokens: tokens_per_microbatch {before} -> {self.tokens}")
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
