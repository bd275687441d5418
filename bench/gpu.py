"""One GPU, in under eight minutes: right against the CPU, then fast.

Correctness in fp32 on a small Qwen3-shaped model: logits, log-probs, gradients, draws. Then tokens/s of the sampler and
MFU of the update for Qwen3 shapes of 0.6B to 4B with random weights at 16,384 tokens, beside prime-rl's published rows.
Prints the tables; writes gpu.md and gpu.json into --out. `--cpu-rehearsal` runs every line with tiny sizes on a CPU,
where its figures mean nothing.
"""

import argparse
import copy
import gc
import json
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bench.common import finish
from bench.engine import Engine, random_model, rows_of, timed
from bench.gpu_tables import QWEN3, data_sheet_flops, markdown
from bench.roofline import Answer, Limits, Sequences, cache_elements
from stoker.batch.out_of_memory import is_out_of_memory
from stoker.batch.speed import copy_bandwidth, matmul_peak
from stoker.engine.counting import model_work, rows_flops
from stoker.engine.local.dtype import fastest_dtype
from stoker.errors import RunError
from stoker.record.memory import peak_resident_bytes
from stoker.rl.types import TrainRow

BUDGET_SECONDS = 400
"""No new row is begun after this; the last one may take a minute."""
SMALL = {
    "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 4096, "tie_word_embeddings": True, "initializer_range": 0.1,
}  # fmt: skip
COMMON = {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936, "tie_word_embeddings": True}
TINY = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8,
        "num_key_value_heads": 2, "vocab_size": 512, "max_position_embeddings": 512}  # fmt: skip
PROMPT = 64
"""Tokens of the update's sequence that are its prompt."""
TOO_LATE = "left out: the time was up"


class Plan:
    """Sizes of the bench, and when it must stop beginning things."""

    def __init__(self, device: torch.device, *, rehearsal: bool, budget: float = BUDGET_SECONDS) -> None:
        self.device, self.rehearsal = device, rehearsal
        named = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
        self.name = named or "CPU (a rehearsal: its figures mean nothing)"
        self.dtype = fastest_dtype(device)
        self.small = TINY if rehearsal else SMALL
        self.tokens = 128 if rehearsal else 16_384
        self.new_tokens = 8 if rehearsal else 256
        self.sequences = (4, 8) if rehearsal else (64, 256)
        self._started, self._budget = time.monotonic(), budget

    @property
    def spent(self) -> float:
        return time.monotonic() - self._started

    @property
    def late(self) -> bool:
        return self.spent > self._budget

    def shape(self, name: str) -> dict[str, Any]:
        return TINY if self.rehearsal else {**QWEN3[name], **COMMON, "max_position_embeddings": 40_960}


# -- right -------------------------------------------------------------------------------------------


def correctness(plan: Plan) -> list[dict[str, Any]]:
    """The same small model on the CPU and on the device; differences, and how large they may be."""
    cpu = torch.device("cpu")
    model = random_model("qwen3", cpu, "float32", **plan.small)
    settings = {"optimizer": {"name": "sgd", "learning_rate": 100.0, "momentum": 0.0, "max_grad_norm": 0.0,
                              "warmup_fraction": 0.0}}  # fmt: skip
    here, there = (Engine.of(copy.deepcopy(model).to(place), **settings) for place in (cpu, plan.device))
    ids = torch.arange(3, 3 + 96).view(2, 48)
    with torch.no_grad():
        logits = [engine.model(input_ids=ids.to(engine.model.device)).logits.cpu() for engine in (here, there)]
    greedy = _agreeing(here, there, greedy=True)
    drawn = _agreeing(here, there, greedy=False)
    rows = rows_of(here.draw(4, 4, 24, 24))
    scores = [torch.from_numpy(np.concatenate(engine.learner.score(rows, "policy"))) for engine in (here, there)]
    moved = [_step(engine, rows) for engine in (here, there)]
    return [
        _check("logits, relative", _distance(*logits), 1e-4),
        _check("log-probs, largest difference in nats", float((scores[0] - scores[1]).abs().max()), 1e-3),
        _check("gradient, relative", _distance(*moved), 1e-3),
        _check("greedy answers that differ", 1 - greedy, 0.05),
        _check("drawn answers that differ", 1 - drawn, 0.1),
    ]


def _agreeing(here: Engine, there: Engine, *, greedy: bool) -> float:
    """Share of answers that are the same; a near tie may fall either way, and all that follows with it."""
    pairs = zip(*(engine.draw(8, 4, 24, 32, greedy=greedy) for engine in (here, there)), strict=True)
    return float(np.mean([np.array_equal(a.token_ids, b.token_ids) for a, b in pairs]))


def _step(engine: Engine, rows: Sequence[TrainRow]) -> Tensor:
    """How far one large SGD step moves the weights: its gradient, times a constant."""
    before = [p.detach().clone() for p in engine.model.parameters()]
    engine.update(rows)
    after = engine.model.parameters()
    return torch.cat([(p.detach() - old).flatten().cpu() for p, old in zip(after, before, strict=True)])


def _distance(expected: Tensor, found: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def _check(name: str, found: float, bound: float) -> dict[str, Any]:
    return {"check": name, "found": found, "bound": bound, "right": found <= bound}


# -- fast --------------------------------------------------------------------------------------------


def sampling(plan: Plan, limits: Limits) -> list[dict[str, Any]]:
    """Tokens/s of the smallest model, groups of 8 with a prompt of 128 tokens."""
    model = random_model("qwen3", plan.device, plan.dtype, **plan.shape("Qwen3-0.6B"))
    engine = Engine.of(model, concurrent_samples=max(plan.sequences))
    rows = []
    for count in plan.sequences:
        row: dict[str, Any] = {"model": "Qwen3-0.6B", "sequences": count, "new_tokens": plan.new_tokens}
        rows.append(_within_memory(plan, row, partial(_sample, engine, count, plan, limits)))
    return rows


def _sample(engine: Engine, count: int, plan: Plan, limits: Limits) -> dict[str, Any]:
    prompt = 128 if not plan.rehearsal else 16
    engine.draw(1, 2, prompt, 4)
    draw = partial(engine.draw, max(1, count // 8), min(8, count), prompt, plan.new_tokens)
    seconds, samples = timed(draw, plan.device)
    answers = [Answer(s.prompt.id, len(s.prompt.token_ids), len(s.token_ids)) for s in samples]
    text, work = engine.model.config.get_text_config(), model_work(engine.model)
    least = Sequences(answers, work, engine.model.dtype.itemsize, cache_elements(text)).seconds(limits)
    tokens = sum(answer.tokens for answer in answers)
    return {"seconds": seconds, "tokens_per_s": tokens / seconds, "share_of_roofline": least / seconds}


def updates(plan: Plan, limits: Limits) -> list[dict[str, Any]]:
    """One sequence of 16,384 tokens, with and without recomputation, the smallest model first."""
    rows = []
    for name in QWEN3:
        for recompute in (True, False):
            row = {"model": name, "device": plan.name, "recompute": recompute, "tokens": plan.tokens}
            rows.append(_within_memory(plan, row, partial(_update, plan, limits, name, recompute=recompute)))
    return rows


def _update(plan: Plan, limits: Limits, name: str, *, recompute: bool) -> dict[str, Any]:
    model = random_model("qwen3", plan.device, plan.dtype, **plan.shape(name))
    settings = {"activation_gib": 0.0 if recompute else None, "tokens_per_microbatch": plan.tokens}
    engine = Engine.of(model, update=settings)
    row = one_row(int(model.config.vocab_size), plan.tokens)
    engine.update([row])
    seconds, _ = timed(lambda: engine.update([row]), plan.device, repeats=3)
    rate = rows_flops([row], model_work(model), training=True) / seconds
    sheet = data_sheet_flops(plan.name)
    return {
        "seconds": seconds,
        "tokens_per_s": plan.tokens / seconds,
        "mfu": rate / limits.flops,
        "mfu_of_data_sheet": rate / sheet if sheet else None,
    }


def one_row(vocabulary: int, tokens: int) -> TrainRow:
    """A prompt and an answer that fill `tokens` positions; the answer's last token is never fed."""
    random = np.random.default_rng(0)
    length = tokens - PROMPT + 1
    answer, some = random.integers(2, vocabulary, length).astype(np.int32), np.full(length, 1.0, np.float32)
    prompt = tuple(random.integers(2, vocabulary, PROMPT).tolist())
    return TrainRow("r:0/0", prompt, answer, np.ones(length, np.bool_), some / length, some, -some)


def _within_memory(plan: Plan, row: dict[str, Any], measure: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
    """The row with what was measured, or with why it wasn't; and the peak memory either way."""
    if plan.late:
        return {**row, "note": TOO_LATE}
    _empty(plan.device)
    try:
        found = dict(measure())
    except (RuntimeError, MemoryError, RunError) as error:
        if not is_out_of_memory(error) and not (isinstance(error, RunError) and "memory" in str(error)):
            raise
        found = {"note": "out of memory"}
    found["peak_gib"] = _peak(plan.device) / 2**30
    print({**row, **found}, flush=True)
    return {**row, **found}


def _empty(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def _peak(device: torch.device) -> int:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else peak_resident_bytes()


def measure(plan: Plan) -> dict[str, Any]:
    dtype, budget = getattr(torch, plan.dtype), 0.02 if plan.rehearsal else 1.0
    limits = Limits(matmul_peak(plan.device, dtype, budget), copy_bandwidth(plan.device, budget))
    result: dict[str, Any] = {
        "device": plan.name,
        "date": datetime.now(UTC).date().isoformat(),
        "torch": torch.__version__,
        "dtype": plan.dtype,
        "peak_flops": limits.flops,
        "bandwidth": limits.bandwidth,
        "correctness": correctness(plan),
    }
    print(result, flush=True)
    result["updates"] = updates(plan, limits)
    result["sampling"] = sampling(plan, limits)
    return {**result, "seconds": plan.spent}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("gpu"), help="folder for gpu.md and gpu.json")
    parser.add_argument("--cpu-rehearsal", action="store_true", help="every line, tiny, on a CPU")
    args = parser.parse_args()
    if not args.cpu_rehearsal and not torch.cuda.is_available():
        raise SystemExit("no CUDA device here; --cpu-rehearsal runs every line on a CPU")
    device = torch.device("cpu" if args.cpu_rehearsal else "cuda")
    result = measure(Plan(device, rehearsal=args.cpu_rehearsal))
    args.out.mkdir(parents=True, exist_ok=True)
    table = markdown(result)
    (args.out / "gpu.md").write_text(table, encoding="utf-8")
    (args.out / "gpu.json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(table)
    finish(result)
    if not all(check["right"] for check in result["correctness"]):
        raise SystemExit("the device's results are not the CPU's: see the first table")


if __name__ == "__main__":
    main()
