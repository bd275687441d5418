"""Answers that share a prompt's line: same numbers and gradients as each alone; and which models may."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    Cohere2Config,
    Cohere2ForCausalLM,
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GraniteConfig,
    GraniteForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from stoker.engine.local.forward import ScoringModel
from stoker.engine.local.layout import Line, collate, lines_of
from stoker.rl.types import KeptTokens, Objective, TrainBatch, TrainRow

Make = Callable[..., Any]


def grouped(rows: list[TrainRow], prompts: int = 2) -> list[TrainRow]:
    """The same answers on few, longer prompts, interleaved."""
    shared = [tuple(range(1, 30 + 7 * index)) for index in range(prompts)]
    return [replace(row, prompt_ids=shared[index % prompts]) for index, row in enumerate(rows)]


def pair(row: TrainRow) -> KeptTokens:
    """Each token and its right neighbour."""
    ids = np.stack([row.token_ids, (row.token_ids + 1) % 256], 1).flatten()
    return KeptTokens(ids, np.arange(0, len(ids) + 1, 2, dtype=np.int32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kept", [False, True])
def test_shared_lines_give_the_gradient_of_separate_ones(
    tiny_llama: PreTrainedModel, make_learner: Make, make_rows: Make, gradients: Make, dtype: torch.dtype, kept: bool
) -> None:
    rows = grouped(make_rows(7, temperature=0.8))
    if kept:
        rows = [replace(row, kept=pair(row)) if index < 4 else row for index, row in enumerate(rows)]
    learner = make_learner(tiny_llama.to(dtype), algorithm={"name": "ppo"})
    results = []
    for width in (32, 0):
        learner._policy.sharing_width = learner._critic.sharing_width = width
        scores = [*learner.score(rows, "policy"), *learner.score(rows, "critic")]
        metrics = learner.forward_backward(TrainBatch(tuple(rows)), Objective("policy", value_clip=0.2))
        results.append((metrics, scores, gradients(learner), gradients(learner, "critic")))
        for optimizer in learner._optimizers.values():
            optimizer.zero()
    (shared, scores, policy, critic), (apart, other_scores, other_policy, other_critic) = results
    tolerance = 2e-6  # also in float64, where Llama's norms and rotary tables stay fp32
    assert (policy - other_policy).norm() <= tolerance * other_policy.norm()
    assert (critic - other_critic).norm() <= tolerance * other_critic.norm()
    for one, other in zip(scores, other_scores, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)
    assert shared["policy/entropy"] == pytest.approx(apart["policy/entropy"], rel=1e-5)


def test_half_the_tokens_are_computed(tiny_llama: PreTrainedModel, make_rows: Make) -> None:
    rows = grouped(make_rows(8))
    lines = lines_of(rows, 4096, 32)
    assert [line.rows for line in lines] == [(0, 2, 4, 6), (1, 3, 5, 7)]
    assert sum(line.length for line in lines) < sum(line.length for line in lines_of(rows, 4096, 0)) / 2


def test_layout_by_hand(make_rows: Make) -> None:
    first, second = make_rows(2)
    first = replace(first, prompt_ids=(7, 8), token_ids=np.array([1, 2, 3]), mask=np.array([True, False, True]))
    second = replace(second, prompt_ids=(7, 8), token_ids=np.array([4]), mask=np.array([True]))
    third = replace(second, token_ids=np.array([5, 6]), mask=np.array([True, True]))
    micro = collate([first, second, third], [Line((0, 1, 2), 5)], torch.device("cpu"))
    assert micro.token_ids.tolist() == [[7, 8, 1, 2, 5]]
    assert micro.positions.tolist() == [[0, 1, 2, 3, 2]]
    assert micro.segments.tolist() == [[0, 0, 1, 1, 3]]
    assert micro.sources.tolist() == [1, 3, 1, 1, 4]
    assert micro.slots.tolist() == [0, 2, 3, 6, 7]
    assert micro.targets.tolist() == [1, 3, 4, 5, 6]
    seen = (micro.mask(torch.float32)[0, 0] == 0).int().tolist()
    assert seen == [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [1, 1, 0, 0, 1]]


@settings(max_examples=60, deadline=None)
@given(
    answers=st.lists(st.tuples(st.integers(0, 2), st.integers(1, 30)), min_size=1, max_size=20),
    ceiling=st.integers(1, 120),
    width=st.sampled_from([0, 16, 4096]),
)
def test_lines_hold_every_row_once_within_the_ceiling(answers: list[tuple[int, int]], ceiling: int, width: int) -> None:
    blank = np.zeros(0, dtype=np.float32)
    rows = [
        TrainRow("", tuple(range(5 + 10 * prompt)), np.zeros(size, dtype=np.int32), blank > 0, blank, blank, blank)
        for prompt, size in answers
    ]
    lines = lines_of(rows, ceiling, width)
    assert sorted(index for line in lines for index in line.rows) == list(range(len(rows)))
    for line in lines:
        prompt = rows[line.rows[0]].prompt_ids
        assert {rows[index].prompt_ids for index in line.rows} == {prompt}
        assert line.length == len(prompt) + sum(len(rows[index].token_ids) - 1 for index in line.rows)
        assert line.length <= ceiling or len(line.rows) == 1


TINY = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
        "intermediate_size": 32, "num_key_value_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.5,
        "pad_token_id": 0}  # fmt: skip
GPT2 = {"vocab_size": 64, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64, "initializer_range": 0.5}
OPT = {"vocab_size": 64, "hidden_size": 16, "ffn_dim": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
       "max_position_embeddings": 64, "word_embed_proj_dim": 8, "init_std": 0.5}  # fmt: skip
GEMMA = {**TINY, "head_dim": 8, "final_logit_softcapping": 2.0}
BLOOM = {"vocab_size": 64, "hidden_size": 16, "n_layer": 2, "n_head": 2}
MAMBA = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 1}
MODELS: dict[str, tuple[Any, bool, bool]] = {  # model, splits into trunk and head, shares lines
    "qwen2": (lambda: Qwen2ForCausalLM(Qwen2Config(**TINY)), True, True),
    "gpt2": (lambda: GPT2LMHeadModel(GPT2Config(**GPT2)), True, True),
    "opt": (lambda: OPTForCausalLM(OPTConfig(**OPT)), True, True),
    "granite": (lambda: GraniteForCausalLM(GraniteConfig(**TINY, logits_scaling=3.0)), True, True),
    "cohere": (lambda: CohereForCausalLM(CohereConfig(**TINY, logit_scale=0.2)), True, True),
    "gemma2": (lambda: Gemma2ForCausalLM(Gemma2Config(**GEMMA)), True, False),
    "mistral": (lambda: MistralForCausalLM(MistralConfig(**TINY, sliding_window=8)), True, False),
    "cohere2": (lambda: Cohere2ForCausalLM(Cohere2Config(**TINY, sliding_window=8)), True, False),
    "bloom": (lambda: BloomForCausalLM(BloomConfig(**BLOOM)), True, False),
    "mamba": (lambda: MambaForCausalLM(MambaConfig(**MAMBA)), True, False),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.filterwarnings("ignore")
def test_every_kind_of_model_is_scored_like_its_own_logits(name: str, make_rows: Make) -> None:
    build, splits, shares = MODELS[name]
    torch.manual_seed(0)
    model = build().eval()
    scoring = ScoringModel(model, positions_per_chunk=4)
    assert (scoring._trunk is not None) == splits, scoring.notes
    assert bool(scoring.sharing_width) == shares
    rows = grouped([replace(row, token_ids=row.token_ids % 64, temperature=0.7) for row in make_rows(5)])
    lines = lines_of(rows, 4096, scoring.sharing_width)
    micro = collate(rows, lines, torch.device("cpu"))
    found = micro.spread(scoring(micro).logprobs)
    for values, row in zip(found, micro.rows, strict=True):
        ids = torch.tensor([[*row.prompt_ids, *row.token_ids.tolist()]])
        logits = model(input_ids=ids).logits[0, len(row.prompt_ids) - 1 : -1] / 0.7
        expected = logits.log_softmax(-1).gather(1, torch.from_numpy(row.token_ids).long()[:, None])[:, 0]
        torch.testing.assert_close(values[: len(expected)], expected, rtol=1e-4, atol=1e-4)


def test_head_that_cannot_be_taken_apart_falls_back_with_a_note(tiny_llama: PreTrainedModel, make_rows: Make) -> None:
    """A hook adds 1 to one logit: no linear head explains that, so the model's own logits are used."""
    tiny_llama.lm_head.register_forward_hook(lambda module, args, out: out + torch.eye(258)[0])
    scoring = ScoringModel(tiny_llama, positions_per_chunk=4)
    assert scoring._trunk is None
    assert "logits_per_chunk has no effect" in scoring.notes[0]
    rows = make_rows(3)
    micro = collate(rows, lines_of(rows, 4096, scoring.sharing_width), torch.device("cpu"))
    values = micro.spread(scoring(micro).logprobs)[0]
    row = micro.rows[0]
    logits = tiny_llama(input_ids=torch.tensor([[*row.prompt_ids, *row.token_ids.tolist()]])).logits[0]
    expected = logits[len(row.prompt_ids) - 1 : -1].log_softmax(-1)
    expected = expected.gather(1, torch.from_numpy(row.token_ids).long()[:, None])[:, 0]
    torch.testing.assert_close(values[: len(expected)], expected, rtol=1e-4, atol=1e-5)


def test_failure_19_a_shared_line_that_does_not_fit_is_cut(
    tiny_llama: PreTrainedModel, make_learner: Make, make_rows: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line of four rows runs out of memory: its rows go into lines of their own."""
    rows = grouped(make_rows(4), prompts=1)
    learner = make_learner(tiny_llama)
    expected = learner.score(rows, "policy")
    score = ScoringModel.__call__

    def small_only(self: ScoringModel, micro: Any) -> Any:
        if len(micro.rows) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return score(self, micro)

    monkeypatch.setattr(ScoringModel, "__call__", small_only)
    for one, other in zip(learner.score(rows, "policy"), expected, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)
