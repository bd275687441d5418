"""Configs, rows and learners for the tests of the local engine."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from stoker.config.schema import RunConfig
from stoker.engine.local.learner import LocalLearner
from stoker.engine.local.load import adapters_to_train
from stoker.rl.types import TrainRow


@pytest.fixture
def run_config() -> Callable[..., RunConfig]:
    """A run file; each keyword is a table to set."""

    def make(**tables: Any) -> RunConfig:
        base = {
            "name": "test",
            "task": {"sources": [{"path": "unused.jsonl"}]},
            "optimizer": {"learning_rate": 1e-2, "warmup_fraction": 0.0},
            "kl": {"coefficient": 0.0},
        }
        return RunConfig.model_validate(base | tables)

    return make


@pytest.fixture
def make_learner(
    run_config: Callable[..., RunConfig], tiny_tokenizer: PreTrainedTokenizerFast
) -> Callable[..., LocalLearner]:
    def make(policy: PreTrainedModel, /, path: str = "base", **tables: Any) -> LocalLearner:
        config = run_config(**tables)
        adapters = adapters_to_train(policy, config, path)
        return LocalLearner(config, policy, tiny_tokenizer, total_samples=1000, adapters=adapters)

    return make


@pytest.fixture
def make_rows() -> Callable[..., list[TrainRow]]:
    """Uneven random rows with token weights, advantages, values and returns, always the same."""

    def make(count: int = 6, seed: int = 0, **fields: Any) -> list[TrainRow]:
        random = np.random.default_rng(seed)
        lengths = random.integers(1, 12, count)
        rows = []
        for index, length in enumerate(lengths):
            given = {
                "sample_id": f"s:{index}/0",
                "prompt_ids": tuple(int(t) for t in random.integers(0, 256, random.integers(1, 9))),
                "token_ids": random.integers(0, 256, length).astype(np.int32),
                "mask": np.ones(length, dtype=np.bool_),
                "weights": np.full(length, 1 / lengths.sum(), dtype=np.float32),
                "advantages": random.normal(size=length).astype(np.float32),
                "sampler_logprobs": np.full(length, -2.0, dtype=np.float32),
                "old_values": np.zeros(length, dtype=np.float32),
                "returns": random.normal(size=length).astype(np.float32),
            }
            rows.append(TrainRow(**(given | fields)))
        return rows

    return make


@pytest.fixture
def gradients() -> Callable[..., torch.Tensor]:
    """All gradients that a learner has summed for a role, flat."""

    def flat(learner: LocalLearner, role: Any = "policy") -> torch.Tensor:
        sums = learner._optimizers[role].gradients()
        return torch.cat([g.flatten() for g in sums if g is not None])

    return flat
