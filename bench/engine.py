"""The local engine on a model of any size, phase by phase, on made-up prompts: what the step benches time."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from stoker.config import schema
from stoker.config.load import from_dict
from stoker.engine.local.fused import prepare_update
from stoker.engine.local.learner import LocalLearner
from stoker.engine.local.load import load_tokenizer
from stoker.engine.local.sampler import LocalSampler
from stoker.rl.types import Objective, Prompt, Request, Sample, SamplingParams, TrainBatch, TrainRow

__all__ = ["Engine", "random_model", "rows_of", "synchronize", "timed"]

T = TypeVar("T")
NEVER = 1
"""The embedded tokenizer's end token: of a model with tens of thousands of tokens it is hardly ever drawn."""


@dataclass(frozen=True)
class Engine:
    """A model with its sampler and learner; answers run to their full length."""

    model: PreTrainedModel
    sampler: LocalSampler
    learner: LocalLearner

    @classmethod
    def of(cls, model: PreTrainedModel, *, concurrent_samples: int = 64, **tables: Any) -> "Engine":
        """`tables` of the run file: update={...}, optimizer={...}. Without a leash, so that no copy of the model is."""
        tokenizer = load_tokenizer(schema.Model())  # ids are all that counts here
        if model.generation_config is not None:
            model.generation_config.eos_token_id = NEVER
        base = {"name": "bench", "task": {"sources": [{"path": "none.jsonl"}]}, "kl": {"coefficient": 0.0}}
        config = from_dict({**base, **tables})
        prepare_update(model, compiled=True)
        sampler = LocalSampler(model, tokenizer, concurrent_samples=concurrent_samples)
        return cls(model, sampler, LocalLearner(config, model, tokenizer, total_samples=1_000_000))

    def draw(
        self, prompts: int, samples: int, prompt_tokens: int, new_tokens: int, *, greedy: bool = False
    ) -> list[Sample]:
        """`samples` answers to each of some random prompts."""
        vocabulary = int(self.model.config.get_text_config().vocab_size)
        random = np.random.default_rng(0)
        params = SamplingParams(temperature=0.0 if greedy else 1.0, max_new_tokens=new_tokens)
        requests = []
        for number in range(prompts):
            ids = tuple(random.integers(2, vocabulary, prompt_tokens).tolist())
            prompt = Prompt(f"p:{number}", ids, "", None)
            requests += [Request(prompt, index, params, seed=0) for index in range(samples)]
        self.sampler.submit(requests)
        return list(self.sampler.collect())

    def update(self, rows: Sequence[TrainRow]) -> None:
        """One optimizer step of the policy loss, the clip included, without a leash."""
        self.learner.forward_backward(TrainBatch(tuple(rows)), Objective("policy"))
        self.learner.step(1_000)


def rows_of(samples: Sequence[Sample]) -> list[TrainRow]:
    """Training rows of samples, with advantages that differ."""
    total = sum(len(sample.token_ids) for sample in samples)
    rows = []
    for number, sample in enumerate(samples):
        length = len(sample.token_ids)
        advantage = np.full(length, (-1.0) ** number * (1 + number % 3), np.float32)
        weight = np.full(length, 1 / total, np.float32)
        mask, prompt_ids = np.ones(length, np.bool_), sample.prompt.token_ids
        rows.append(TrainRow(sample.id, prompt_ids, sample.token_ids, mask, weight, advantage, sample.logprobs))
    return rows


def random_model(kind: str, device: torch.device, dtype: str, **sizes: Any) -> PreTrainedModel:
    """A model of this Hugging Face type with random weights, made on its device. Always the same on a device."""
    config = AutoConfig.for_model(kind, **sizes, eos_token_id=NEVER, pad_token_id=0, bos_token_id=None)
    with torch.random.fork_rng(), device:
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype)).eval()


def timed(work: Callable[[], T], device: torch.device, repeats: int = 1) -> tuple[float, T]:
    """Seconds of the fastest of `repeats` calls, and the last one's result."""
    best, result = float("inf"), None
    for _ in range(repeats):
        synchronize(device)
        start = time.perf_counter()
        result = work()
        synchronize(device)
        best = min(best, time.perf_counter() - start)
    return best, result  # type: ignore[return-value]


def synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
