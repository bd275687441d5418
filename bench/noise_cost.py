"""What measuring the noise scale costs: CPU-seconds with a meter over those without, in pairs of blocks.

Blocks alternate in one process, each with all updates between two measured ones, and the order within a pair turns
round. The interval is Student's, of the logs of the pairs' ratios. Cases: a causal transformer through
`accumulate(..., noise=meter)` at two sizes, and the update of an RL run with the embedded model (sampling, which an RL
run spends most of its time on and which is the same either way, left out).
"""

import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bench.engine import Engine, rows_of
from stoker.batch import student
from stoker.batch.accumulation import accumulate
from stoker.batch.noise import NoiseScale
from stoker.config import schema
from stoker.engine.local.load import load_model
from stoker.rl.noise import GroupNoise, split
from stoker.rl.types import Objective, TrainBatch

__all__ = ["measure"]

SECONDS, QUICK_SECONDS = 12.0, 3.0
"""CPU time of each case."""
PAIRS = (8, 200)
"""At least and at most."""
EVERY = schema.Record().noise_every_steps
Block = Callable[[bool], None]
"""Runs the updates of one block, with a meter or without."""


class Decoder(nn.Module):
    """A small causal language model of PyTorch's own layers."""

    def __init__(self, width: int, layers: int, words: int = 2048, length: int = 128) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(length, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, F.gelu, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, words)
        self.register_buffer("seen", nn.Transformer.generate_square_subsequent_mask(length))

    def forward(self, ids: Tensor) -> Tensor:
        """(B, T) -> (B, T, words)."""
        x = self.words(ids) + self.places.weight[: ids.shape[1]]
        found: Tensor = self.head(self.layers(x, mask=self.seen[: ids.shape[1], : ids.shape[1]], is_causal=True))
        return found


def supervised(width: int, layers: int, texts: int) -> Block:
    """4 micro-batches of `texts` texts of 128 tokens an update, AdamW."""
    torch.manual_seed(0)
    model = Decoder(width, layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    window = [torch.randint(2048, (texts, 128)) for _ in range(4)]
    meter = NoiseScale()

    def loss(model: nn.Module, ids: Tensor) -> Tensor:
        return F.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())

    def block(measuring: bool) -> None:
        for _ in range(meter.every):
            optimizer.zero_grad()
            accumulate(model, loss, window, noise=meter if measuring else None)
            optimizer.step()

    return block


def reinforced() -> Block:
    """Updates of 16 prompts x 8 samples of the embedded model, as a run file has them by default."""
    torch.manual_seed(0)
    engine = Engine.of(load_model(schema.Model(from_scratch=True), 0))
    rows = tuple(rows_of(engine.draw(prompts=16, samples=8, prompt_tokens=16, new_tokens=32)))
    meter = GroupNoise()

    def block(measuring: bool) -> None:
        for number in range(EVERY):
            measure = number if measuring and number == 0 else None
            found = engine.learner.forward_backward(TrainBatch(rows, measure), Objective("policy"))
            if looked := split(found)[0]:
                meter.add(looked)
                meter.metrics()
            engine.learner.step(1_000)

    return block


CASES: dict[str, Callable[[], Block]] = {
    "supervised, 4.3M weights, 256-token micro-batches": lambda: supervised(256, 4, 2),
    "supervised, 0.7M weights, 128-token micro-batches": lambda: supervised(96, 2, 1),
    "RL update, embedded model": reinforced,
}


def paired(block: Block, seconds: float) -> dict[str, float]:
    """The share that a meter adds, with its 95 % interval, from pairs that take so long together."""
    block(True)
    started = time.process_time()
    block(True)
    pairs = max(PAIRS[0], min(PAIRS[1], round(seconds / (time.process_time() - started) / 2)))
    ratios = []
    for pair in range(pairs):
        spent = {}
        for measuring in (False, True) if pair % 2 else (True, False):
            started = time.process_time()
            block(measuring)
            spent[measuring] = time.process_time() - started
        ratios.append(math.log(spent[True] / spent[False]))
    mean = statistics.mean(ratios)
    half = student.quantile(pairs - 1) * statistics.stdev(ratios) / math.sqrt(pairs)
    return {
        "pairs": pairs,
        "overhead": math.expm1(mean),
        "low": math.expm1(mean - half),
        "high": math.expm1(mean + half),
    }


def measure(quick: bool) -> dict[str, Any]:
    """Each case, and the one whose interval reaches highest as the whole's."""
    cases = {}
    for name, make in CASES.items():
        cases[name] = found = paired(make(), QUICK_SECONDS if quick else SECONDS)
        print(f"{name:52} {found['overhead']:+.2%} ({found['low']:+.2%} to {found['high']:+.2%})", flush=True)
    worst = max(cases, key=lambda name: cases[name]["high"])
    return {"case": worst, **cases[worst], "cases": cases}
