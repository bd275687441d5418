"""What the ports are asked for, in FLOPs counted by hand."""

from collections.abc import Iterator, Sequence
from typing import Any, cast

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from stoker.batch.flops import Attention, Work
from stoker.engine.counting import (
    CountingLearner,
    CountingSampler,
    WorkTally,
    model_work,
    rows_flops,
    samples_flops,
)
from stoker.rl.ports import Learner, Sampler
from stoker.rl.types import Objective, Prompt, Sample, SamplingParams, TrainBatch, TrainRow

WORK = Work(linear=100, head=10, attention=(Attention(1, 2),))  # 8 a pair of positions


def sample(prompt: Sequence[int], length: int) -> Sample:
    ids = np.zeros(length, np.int32)
    return Sample(Prompt("p", tuple(prompt), "", None), 0, SamplingParams(), 0, ids, ids.astype(np.float32), "", "stop")


def row(prompt: Sequence[int], length: int, *, advantage: float = 1.0, counted: bool = True) -> TrainRow:
    some = np.full(length, advantage, np.float32)
    return TrainRow("r", tuple(prompt), np.zeros(length, np.int32), np.full(length, counted), some, some, some)


def test_a_groups_prompt_counts_once_and_the_last_token_is_never_fed() -> None:
    samples = [sample((1, 2, 3), 3), sample((1, 2, 3), 1)]
    prefill = 2 * 100 * 3 + 2 * 10 + 8 * (1 + 2 + 3)
    answer = 2 * 110 * 2 + 8 * (4 + 5)  # the first token comes of the prefill
    assert samples_flops(samples, WORK) == prefill + answer
    assert samples_flops([*samples, sample((9,), 1)], WORK) == prefill + answer + 2 * 110 + 8


def test_rows_of_an_update() -> None:
    rows = [row((1, 2), 3), row((1, 2), 1)]
    prompt = 6 * 100 * 2 + 3 * 8 * (1 + 2)
    answers = 6 * (100 * 2 + 10 * 3) + 3 * 8 * (3 + 4) + 6 * 10
    assert rows_flops(rows, WORK, training=True) == prompt + answers
    assert rows_flops(rows, WORK, training=False) == (prompt + answers) / 3


class Silent:
    """Stands for either port."""

    notes = ("told",)

    def collect(self) -> Iterator[Sample]:
        yield sample((1,), 2)
        yield sample((1,), 3)

    def score(self, rows: Sequence[TrainRow], role: str) -> list[Any]:
        return []

    def forward_backward(self, batch: TrainBatch, objective: Objective) -> dict[str, float]:
        return {}


def test_work_is_booked_to_the_phase_that_is_on() -> None:
    phase = "sample"
    tally = WorkTally(lambda: phase)
    sampler = CountingSampler(cast("Sampler", Silent()), WORK, tally)
    assert len(list(sampler.collect())) == 2
    assert sampler.notes == ("told",)
    learner = CountingLearner(cast("Learner", Silent()), {"policy": WORK}, tally)
    phase = "score"
    learner.score([row((1,), 2)], "reference")
    phase = "update"
    kept, left, useless = row((1,), 2), row((2,), 9, counted=False), row((3,), 9, advantage=0.0)
    learner.forward_backward(TrainBatch((kept, left, useless)), Objective("policy"))
    expected = {
        "sample": samples_flops([sample((1,), 2), sample((1,), 3)], WORK),
        "score": rows_flops([kept], WORK, training=False),
        "update": rows_flops([kept], WORK, training=True),  # the other two teach nothing
    }
    assert dict(tally.flops) == expected
    assert dict(tally.tokens) == {"sample": 5, "score": 2, "update": 2}


def test_the_critic_trains_beside_the_policy_or_alone() -> None:
    critic = Work(linear=7, head=0)
    for loss, expected in (("policy", WORK.training(2) + critic.training(2)), ("value", critic.training(2))):
        tally = WorkTally(lambda: "update")
        learner = CountingLearner(cast("Learner", Silent()), {"policy": WORK, "critic": critic}, tally)
        learner.forward_backward(TrainBatch((row((1,), 2),)), Objective(loss))
        assert tally.flops["update"] == expected


def test_the_work_of_a_loaded_model(tiny_llama: PreTrainedModel) -> None:
    matrices = 2 * (32 * (32 + 16 + 16 + 32) + 3 * 32 * 64)
    assert model_work(tiny_llama) == Work(matrices, 258 * 32, (Attention(2, 32),))
    assert model_work(tiny_llama, head=False).head == 0


@pytest.mark.parametrize("tied", [True, False])
def test_an_unknown_kind_counts_its_parameters_without_an_untied_input_table(tied: bool) -> None:
    config = AutoConfig.for_model(
        "falcon", hidden_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=50, tie_word_embeddings=tied
    )
    model = AutoModelForCausalLM.from_config(config)
    parameters = sum(p.numel() for p in model.parameters())
    assert model_work(model).forward(1) == 2 * (parameters - (0 if tied else 50 * 16))


def test_adapters_are_told_by_their_names(tiny_llama: PreTrainedModel) -> None:
    tiny_llama.requires_grad_(False)
    projection = tiny_llama.get_submodule("model.layers.0.self_attn.q_proj")
    for name in ("lora_A", "lora_B"):
        projection.register_parameter(name, torch.nn.Parameter(torch.zeros(4, 32)))
    assert model_work(tiny_llama).adapters == 2 * 4 * 32
