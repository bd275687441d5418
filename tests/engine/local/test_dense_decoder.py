"""stoker's own decoding of dense models: which models take it, and that it is transformers' forward to rounding."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from scipy import stats
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Phi3Config,
    PhiConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    StableLmConfig,
)

from stoker.engine.local import dense_decoder, step_math
from stoker.engine.local.compiler import Library, load_library
from stoker.engine.local.dense import Dense, read_dense
from stoker.engine.local.dense_decoder import DenseDecoder, mismatch
from stoker.engine.local.sampler import LocalSampler
from stoker.rl.types import Prompt, Request, Sample, SamplingParams

SIZE = {
    "vocab_size": 258,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "initializer_range": 0.4,  # far from uniform, so that a wrong part shows
}
SMALL = SIZE | {"initializer_range": 0.1, "head_dim": 8, "sliding_window": 6}  # Gemma: inputs are scaled up
MIXED = {"layer_types": ["sliding_attention", "full_attention"]}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip

DENSE: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SIZE),
    "llama tied": LlamaConfig(**SIZE, tie_word_embeddings=True),
    "llama biases": LlamaConfig(**SIZE, attention_bias=True, mlp_bias=True),
    "llama3 rotary": LlamaConfig(**SIZE, rope_parameters=LLAMA3),
    "linear rotary": LlamaConfig(**SIZE, rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}),
    "no groups": LlamaConfig(**(SIZE | {"num_key_value_heads": 4})),
    "wide heads": LlamaConfig(**SIZE, head_dim=16),
    "mistral window": MistralConfig(**SIZE, sliding_window=6),
    "qwen2": Qwen2Config(**SIZE),
    "qwen2 windows": Qwen2Config(**SIZE, use_sliding_window=True, sliding_window=6, max_window_layers=1),
    "qwen3": Qwen3Config(**SIZE, head_dim=8),
    "qwen3 tied": Qwen3Config(**SIZE, head_dim=8, tie_word_embeddings=True),
    "gemma": GemmaConfig(**(SIZE | {"initializer_range": 0.1}), head_dim=8),
    "gemma2": Gemma2Config(
        **SMALL, **MIXED, attn_logit_softcapping=2.0, final_logit_softcapping=3.0, query_pre_attn_scalar=5
    ),
    "gemma3": Gemma3TextConfig(**SMALL, **MIXED, query_pre_attn_scalar=5),
}
OTHER: dict[str, PreTrainedConfig] = {
    "dynamic rotary": LlamaConfig(**SIZE, rope_parameters={"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}),
    "partial rotary": PhiConfig(**SIZE, partial_rotary_factor=0.5),
    "partial rotary, llama-like": StableLmConfig(**SIZE, partial_rotary_factor=0.5),
    "fused weights": Phi3Config(**SIZE),
    "experts": MixtralConfig(**SIZE, num_local_experts=2, num_experts_per_tok=1),
    "looks ahead": Gemma3TextConfig(**SMALL, **MIXED, use_bidirectional_attention=True),
}


def build(config: PreTrainedConfig) -> PreTrainedModel:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config).eval()
        for name, parameter in model.named_parameters():  # norms and biases start at 1 or 0, which would hide them
            if "norm" in name or name.endswith("bias"):
                torch.nn.init.normal_(parameter, float(parameter.detach().mean()), 0.2)
    return model


@pytest.fixture(params=["operators", "compiled"])
def library(request: pytest.FixtureRequest) -> Library | None:
    return needed_library() if request.param == "compiled" else None


def needed_library() -> Library:
    library = load_library()
    if isinstance(library, str):
        pytest.skip(library)
    return library


def decoder_of(
    model: PreTrainedModel, library: Library | None = None, longest: int = 64, length: int = 128
) -> DenseDecoder:
    dense = read_dense(model, library)
    assert isinstance(dense, Dense)
    return DenseDecoder(dense, longest, length)


def last_logits(model: PreTrainedModel, token_ids: Sequence[int]) -> Tensor:
    """After a whole sequence, by transformers, without a cache: (V,)."""
    return model(input_ids=torch.tensor([list(token_ids)]), use_cache=False).logits[0, -1]


class Forced:
    """Rows of a decoder that are fed random tokens, with their sequences beside them."""

    def __init__(self, model: PreTrainedModel, library: Library | None = None) -> None:
        self.model, self.decoder = model, decoder_of(model, library)
        self.rows: list[list[int]] = []
        self.generator = torch.Generator().manual_seed(3)

    def enter(self, *prompts: Sequence[int]) -> None:
        logits = self.decoder.logits(self.decoder.enter([tuple(p) for p in prompts]))
        self.rows += [list(p) for p in prompts]
        self.check(logits, self.rows[-len(prompts) :])

    def feed(self, steps: int) -> None:
        for step in range(steps):
            tokens = torch.randint(0, 258, (len(self.rows),), generator=self.generator)
            for row, token in zip(self.rows, tokens.tolist(), strict=True):
                row.append(token)
            hidden = self.decoder.step(tokens)
            if step % 5 == 0 or step == steps - 1:
                self.check(self.decoder.logits(hidden), self.rows)

    def keep(self, order: Sequence[int], upcoming: tuple[int, ...] | None = None) -> None:
        self.decoder.keep(order, upcoming)
        self.rows = [self.rows[row] for row in order]

    def check(self, logits: Tensor, rows: Sequence[Sequence[int]]) -> None:
        expected = torch.stack([last_logits(self.model, row) for row in rows])
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", DENSE)
@torch.no_grad()
def test_logits_are_transformers_while_rows_enter_and_leave(name: str, library: Library | None) -> None:
    model = build(DENSE[name])
    assert mismatch(model, library) is None
    forced = Forced(model, library)
    long, short, other = tuple(range(11)), (40, 41, 42), (9, 8, 7, 6, 5)
    forced.enter(long, long, short, long)
    forced.feed(4)
    forced.keep([0, 3, 2])  # a gap filled from the end
    forced.feed(2)
    forced.enter(other, short)  # a new prompt, and one more row of one that is there
    forced.feed(3)
    forced.keep([4, 1], upcoming=long)
    forced.enter(long)
    forced.feed(90)  # past the room that the buffers begin with
    forced.keep([])
    forced.enter(short)
    forced.feed(2)


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3 tied", "gemma2", "gemma3"])
@torch.no_grad()
def test_greedy_tokens_are_the_best_ones(name: str, tiny_tokenizer: Any) -> None:
    model = build(DENSE[name])
    sampler = LocalSampler(model, tiny_tokenizer, concurrent_samples=3)
    prompts = [Prompt(f"p:{n}", tuple(range(n, 2 * n + 1)), "", None) for n in (2, 5, 9, 3, 12)]
    sampler.submit([Request(prompt, 0, SamplingParams(temperature=0, max_new_tokens=20), 0) for prompt in prompts])
    checked = 0
    for sample in sampler.collect():
        start, ids = len(sample.prompt.token_ids), [*sample.prompt.token_ids, *sample.token_ids.tolist()]
        best = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, start - 1 : -1].topk(2)
        for token, values, indices in zip(sample.token_ids, best.values, best.indices, strict=True):
            if values[0] - values[1] > 1e-3:
                assert token == indices[0]
                checked += 1
    assert checked > 50


@torch.no_grad()
@pytest.mark.parametrize("width", [48, 64])
@pytest.mark.parametrize("name", DENSE)
def test_low_precision_is_as_close_as_transformers(name: str, width: int, library: Library | None) -> None:
    config = copy.deepcopy(DENSE[name])
    config.intermediate_size = width  # 64: a step is one call where there are tiles or dots
    exact = build(config).to(torch.bfloat16).float()  # the same weights
    model = build(config).to(torch.bfloat16)
    assert mismatch(model, library) is None
    decoder = decoder_of(model, library)
    if library is not None:
        assert (decoder._math._step is not None) is ((library.tiles or library.dots) and width == 64)
    prompts = [(1, 2, 3)] * 20 + [(7, 8, 9, 10, 11)] * 17
    fed = torch.randint(0, 258, (37, 8), generator=torch.Generator().manual_seed(5))
    first = decoder.logits(decoder.enter(prompts))
    assert first.dtype == torch.bfloat16
    found = [decoder.logits(decoder.step(column)) for column in fed.T[:4]]
    left = [0, 36, 2, 35, *range(4, 35)]  # two rows have gone
    decoder.keep(left, None)
    found += [decoder.logits(decoder.step(column[left])) for column in fed.T[4:]]
    ours, theirs = [], []
    for row, number in enumerate(left):
        ids = torch.tensor([[*prompts[number], *fed[number].tolist()]])
        expected = exact(input_ids=ids, use_cache=False).logits[0, -8:]
        theirs.append(model(input_ids=ids, use_cache=False).logits[0, -8:].float() - expected)
        logits = [*(before[number] for before in found[:4]), *(after[row] for after in found[4:])]
        ours.append(torch.stack(logits).float() - expected)
    assert torch.stack(ours).square().mean() < 1.2 * torch.stack(theirs).square().mean()


@torch.no_grad()
def test_more_rows_than_a_whole_step_is_for_go_part_by_part(library: Library | None) -> None:
    model = build(DENSE["qwen3"])
    many, few = decoder_of(model, library), decoder_of(model, library)
    for decoder, rows in ((many, 70), (few, 2)):
        decoder.enter([(1, 2, 3)] * rows)
    for token in (4, 5):
        found = many.logits(many.step(torch.full((70,), token)))
        expected = few.logits(few.step(torch.full((2,), token)))
        torch.testing.assert_close(found, expected[:1].expand(70, -1), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_a_weight_that_is_no_number_shows_in_the_logits(dtype: torch.dtype, library: Library | None) -> None:
    model = build(DENSE["qwen3"]).to(dtype)
    model.model.layers[0].mlp.up_proj.weight[3, 3] = torch.nan
    decoder = decoder_of(model, library)
    decoder.enter([(1, 2, 3)])
    assert decoder.logits(decoder.step(torch.tensor([4]))).isnan().all()


@pytest.mark.parametrize("name", OTHER)
def test_other_models_are_told_apart_and_said(name: str, tiny_tokenizer: Any) -> None:
    model = build(OTHER[name])
    assert mismatch(model) is not None
    if name != "looks ahead":  # which can't be sampled at all
        notes = LocalSampler(model, tiny_tokenizer, concurrent_samples=2).notes
        assert sum("sampled through transformers' own modules" in note for note in notes) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_part_that_is_hidden_altogether_weighs_nothing(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    query, keys, values = (torch.randn(2, 1, n, 8, generator=generator).to(dtype) for n in (1, 5, 5))
    own = step_math.attend_part(query, keys, values, None, None)
    beyond = step_math._added(torch.ones(2, 1, 1, 5, dtype=torch.bool))
    hidden = step_math.attend_part(query, keys.flip(2), values.flip(1) + 1, beyond, None)
    assert torch.equal(step_math.merge_parts(own, hidden), own[0])


@torch.no_grad()
def test_a_wrong_part_is_found_before_anything_is_drawn(
    tiny_llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_math, "merge_parts", lambda own, shared: own[0])
    assert "logits differ" in str(mismatch(tiny_llama))


def test_a_hook_is_never_passed_by(tiny_llama: PreTrainedModel, tiny_tokenizer: Any) -> None:
    sampler = LocalSampler(tiny_llama, tiny_tokenizer, concurrent_samples=2)
    assert sampler.notes == []
    calls: list[int] = []
    tiny_llama.model.layers[0].register_forward_hook(lambda *_: calls.append(1))
    sampler.submit([Request(Prompt("p:0", (1, 2), "", None), 0, SamplingParams(max_new_tokens=2), 0)])
    list(sampler.collect())
    assert calls
    assert len(sampler.notes) == 1 and "hook on model.layers.0" in sampler.notes[0]


@torch.no_grad()
def test_adapters_are_called_and_weights_are_read_anew() -> None:
    model = build(DENSE["qwen2"])
    forced = Forced(model)
    forced.enter((1, 2, 3))
    inject_adapter_in_model(LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False), model)
    assert mismatch(model) is None
    adapted = Forced(model)
    adapted.enter((1, 2, 3))
    adapted.feed(3)
    model.model.layers[0].mlp.up_proj.weight = torch.nn.Parameter(torch.randn(48, 32))
    changed = Forced(model)
    changed.enter((1, 2, 3))
    changed.feed(3)


def test_each_prompt_is_computed_once_and_only_where_it_must(
    tiny_llama: PreTrainedModel, tiny_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed: list[tuple[int, ...]] = []
    prefill = DenseDecoder._prefill

    def spy(self: DenseDecoder, prompts: Sequence[tuple[int, ...]]) -> Tensor:
        computed.extend(prompts)
        return prefill(self, prompts)

    monkeypatch.setattr(DenseDecoder, "_prefill", spy)
    sampler = LocalSampler(tiny_llama, tiny_tokenizer, concurrent_samples=5)
    computed.clear()
    prompts = [Prompt(f"p:{n}", (n, n + 1, 7), "", None) for n in range(4)]
    params = SamplingParams(max_new_tokens=9)
    sampler.submit([Request(prompt, n, params, 0) for prompt in prompts for n in range(6)])
    assert len(list(sampler.collect())) == 24
    assert computed == [prompt.token_ids for prompt in prompts]


def test_prompts_are_computed_in_portions() -> None:
    prompts = [(0,) * 3000, (1,) * 3000, (2,) * 3000, (3,) * 10, (4,) * 9000]
    assert [[len(p) for p in some] for some in dense_decoder._portions(prompts)] == [[3000, 3000], [3000, 10], [9000]]


def collected(sampler: LocalSampler, wanted: Sequence[Request]) -> dict[str, Sample]:
    sampler.submit(wanted)
    return {sample.id: sample for sample in sampler.collect()}


MIXED_PARAMS = (
    SamplingParams(max_new_tokens=7),
    SamplingParams(temperature=0.6, max_new_tokens=30),
    SamplingParams(top_p=0.8, max_new_tokens=12),
    SamplingParams(temperature=0, max_new_tokens=9),
    SamplingParams(top_k=5, temperature=1.3, max_new_tokens=20, stop=("e",)),
)


def test_a_row_among_others_is_drawn_as_alone(tiny_llama: PreTrainedModel, tiny_tokenizer: Any) -> None:
    tiny_llama.generation_config.eos_token_id = list(range(24))  # answers of many lengths
    prompts = [Prompt(f"p:{n}", tuple(range(30, 33 + 2 * n)), "", None) for n in range(5)]
    wanted = [Request(p, n, MIXED_PARAMS[n], 4) for p in prompts for n in range(5)]
    found = collected(LocalSampler(tiny_llama, tiny_tokenizer, concurrent_samples=6), wanted)
    again = collected(LocalSampler(tiny_llama, tiny_tokenizer, concurrent_samples=6), wanted)
    alone = LocalSampler(tiny_llama, tiny_tokenizer, concurrent_samples=1)
    for request in wanted:
        sample_id = f"{request.prompt.id}/{request.index}"
        (one,) = collected(alone, [request]).values()
        np.testing.assert_array_equal(found[sample_id].token_ids, one.token_ids)
        np.testing.assert_allclose(found[sample_id].logprobs, one.logprobs, atol=1e-4)
        np.testing.assert_array_equal(found[sample_id].logprobs, again[sample_id].logprobs, "bit for bit")
        assert (found[sample_id].text, found[sample_id].finish) == (one.text, one.finish)
        assert found[sample_id].params == request.params
        assert len(one.token_ids) <= request.params.max_new_tokens
        assert (found[sample_id].kept is None) is (not request.params.truncates)


def test_draws_follow_the_model_under_mixed_parameters(tiny_llama: PreTrainedModel, tiny_tokenizer: Any) -> None:
    count, prompt = 6000, Prompt("p:0", (72, 105), "", None)
    mixed = [
        SamplingParams(temperature=2.0, max_new_tokens=1),
        SamplingParams(temperature=2.0, top_p=0.7, max_new_tokens=1),
        SamplingParams(temperature=2.0, top_k=20, max_new_tokens=1),
    ]
    sampler = LocalSampler(tiny_llama, tiny_tokenizer, concurrent_samples=900)
    found = collected(sampler, [Request(prompt, n, mixed[n % 3], 1) for n in range(3 * count)])
    with torch.no_grad():
        probabilities = (last_logits(tiny_llama, prompt.token_ids).double() / 2).softmax(-1).numpy()
    order = np.argsort(-probabilities)
    before = np.cumsum(probabilities[order]) - probabilities[order]
    kept = [np.ones(258, bool), before < 0.7, np.arange(258) < 20]
    for which, mask in enumerate(kept):
        exact = np.zeros(258)
        exact[order[mask]] = probabilities[order[mask]] / probabilities[order[mask]].sum()
        drawn = [int(sample.token_ids[0]) for sample in found.values() if sample.index % 3 == which]
        seen = np.bincount(drawn, minlength=258)
        assert len(drawn) == count and seen[exact == 0].sum() == 0
        common = exact * count >= 5
        seen_bins = np.append(seen[common], seen[~common].sum() + 1e-9)
        expected = np.append(exact[common], exact[~common].sum() + 1e-12) * count
        assert stats.chisquare(seen_bins, expected * seen_bins.sum() / expected.sum()).pvalue > 0.01


@pytest.fixture
def fail_above(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Make a step of more than so many rows run out of memory."""
    step = DenseDecoder.step

    def install(rows: int) -> None:
        def failing(self: DenseDecoder, token_ids: Tensor) -> Tensor:
            if len(token_ids) > rows:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return step(self, token_ids)

        monkeypatch.setattr(DenseDecoder, "step", failing)

    return install


def test_failure_20_out_of_memory_halves_and_draws_the_same(
    tiny_llama: PreTrainedModel, tiny_tokenizer: Any, fail_above: Callable[[int], None]
) -> None:
    prompts = [Prompt(f"p:{n}", (n, 5, 6), "", None) for n in range(4)]
    wanted = [Request(p, n, SamplingParams(max_new_tokens=8), 0) for p in prompts for n in range(5)]
    expected = collected(LocalSampler(tiny_llama, tiny_tokenizer, concurrent_samples=64), wanted)
    sampler = LocalSampler(tiny_llama, tiny_tokenizer, concurrent_samples=64)
    fail_above(6)
    found = collected(sampler, wanted)
    assert sampler.concurrent_samples == 5  # 20 -> 10 -> 5
    assert "out of memory at 20 concurrent samples; going on with 10." in sampler.notes
    for sample_id, sample in expected.items():
        np.testing.assert_array_equal(found[sample_id].token_ids, sample.token_ids)
