"""Any Hugging Face causal language model: what the sampler says a token cost is what a plain forward says.

One tiny random model for each way of attending: learned positions, rotary, grouped heads, sliding windows,
latent attention, experts, states without attention, hybrids, and no cache at all.
"""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertLMHeadModel,
    BloomConfig,
    DeepseekV3Config,
    FalconConfig,
    FalconH1Config,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    JambaConfig,
    LlamaConfig,
    LlamaModel,
    Mamba2Config,
    MambaConfig,
    MistralConfig,
    MixtralConfig,
    OPTConfig,
    Phi3Config,
    PhiConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3Config,
    Qwen3MoeConfig,
    RobertaConfig,
    RwkvConfig,
)

from stoker.engine.local.learner import LocalLearner
from stoker.engine.local.sampler import LocalSampler
from stoker.errors import ModelError
from stoker.rl.types import Objective, Prompt, Request, Sample, SamplingParams, TrainBatch, TrainRow

SIZE = {
    "vocab_size": 258,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "initializer_range": 0.4,  # far from uniform, so that a wrong context shows
}
GROUPED = SIZE | {"num_key_value_heads": 2}
EXPERTS = GROUPED | {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
SSM = {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_chunk_size": 4}

PADDED: dict[str, PreTrainedConfig] = {
    "gpt2": GPT2Config(**SIZE),
    "gpt_neox": GPTNeoXConfig(**SIZE),
    "falcon": FalconConfig(**SIZE),
    "opt": OPTConfig(**SIZE, word_embed_proj_dim=32, ffn_dim=48),
    "phi": PhiConfig(**SIZE),
    "phi3": Phi3Config(**GROUPED, sliding_window=8),
    "llama": LlamaConfig(**GROUPED),
    "llama_eager": LlamaConfig(**GROUPED, attn_implementation="eager"),
    "mistral": MistralConfig(**GROUPED, sliding_window=8),
    "qwen3": Qwen3Config(**GROUPED, head_dim=8),
    "gemma3": Gemma3TextConfig(
        **(GROUPED | {"initializer_range": 0.1}),  # its input embeddings are the output's, times 6
        head_dim=8, sliding_window=8, layer_types=["sliding_attention", "full_attention"],
    ),
    "mixtral": MixtralConfig(**GROUPED, num_local_experts=4, num_experts_per_tok=2),
    "qwen3_moe": Qwen3MoeConfig(**EXPERTS, head_dim=8, num_experts=4),
    "deepseek_v3": DeepseekV3Config(
        **(EXPERTS | {"num_key_value_heads": 4}),
        n_routed_experts=4, n_group=2, topk_group=1, first_k_dense_replace=1,
        q_lora_rank=16, kv_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=8, v_head_dim=6,
    ),
}  # fmt: skip
UNPADDED: dict[str, PreTrainedConfig] = {
    "bloom": BloomConfig(**SIZE),
    "roberta": RobertaConfig(**(SIZE | {"pad_token_id": 1}), is_decoder=True),
    "mamba": MambaConfig(**SIZE, state_size=8),
    "mamba2": Mamba2Config(**SIZE, state_size=8, num_heads=8, head_dim=8, n_groups=1, chunk_size=4),
    "jamba": JambaConfig(
        **GROUPED, use_mamba_kernels=False, num_experts=2, mamba_d_state=8, attn_layer_period=2, attn_layer_offset=1
    ),
    "falcon_h1": FalconH1Config(**GROUPED, **SSM, mamba_n_groups=1),
}
NO_CACHE: dict[str, PreTrainedConfig] = {"rwkv": RwkvConfig(**SIZE, attention_hidden_size=32, context_length=64)}
ALL = PADDED | UNPADDED | NO_CACHE


def build(name: str) -> PreTrainedModel:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(ALL[name]).eval()
    model.generation_config.eos_token_id = list(range(24))  # answers end at different lengths, so rows are dropped
    return model


def prompt(name: str, length: int) -> Prompt:
    token_ids = tuple((7 * place + 3 * length) % 256 for place in range(length))
    return Prompt(id=f"test:{name}", token_ids=token_ids, content="", answer=None)


def draw(model: PreTrainedModel, tokenizer: object, params: SamplingParams) -> list[Sample]:
    """Prompts shorter and longer than the windows above, in groups of three, all in one wave where it can be."""
    sampler = LocalSampler(model, tokenizer, concurrent_samples=64)  # type: ignore[arg-type]
    prompts = [prompt("long", 11), prompt("short", 3), prompt("short too", 3), prompt("middle", 6)]
    sampler.submit([Request(p, index, params, seed=5) for p in prompts for index in range(3)])
    samples = list(sampler.collect())
    assert sorted(s.id for s in samples) == sorted(f"{p.id}/{index}" for p in prompts for index in range(3))
    return samples


def plain_logprobs(model: PreTrainedModel, sample: Sample) -> np.ndarray:
    """Of one sequence alone, without padding or cache, at the sampling temperature; (T,)."""
    ids = torch.tensor([[*sample.prompt.token_ids, *sample.token_ids.tolist()]])
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits[0].float() / sample.params.temperature
    start = len(sample.prompt.token_ids)
    return logits.log_softmax(-1)[start - 1 : -1].gather(1, ids[0, start:, None])[:, 0].numpy()


@pytest.mark.parametrize("name", ALL)
def test_logprobs_equal_a_plain_forward(name: str, tiny_tokenizer: object) -> None:
    model = build(name)
    samples = draw(model, tiny_tokenizer, SamplingParams(temperature=0.8, max_new_tokens=9))
    for sample in samples:
        np.testing.assert_allclose(sample.logprobs, plain_logprobs(model, sample), atol=1e-4, err_msg=sample.id)
    assert len({tuple(s.token_ids) for s in samples}) > len(samples) // 2, "samples of a group differ"
    assert len({len(s.token_ids) for s in samples}) > 2, "rows are dropped on the way"


def train_row(sample: Sample, tokens: int) -> TrainRow:
    length = len(sample.token_ids)
    return TrainRow(
        sample_id=sample.id,
        prompt_ids=sample.prompt.token_ids,
        token_ids=sample.token_ids,
        mask=np.ones(length, np.bool_),
        weights=np.full(length, 1 / tokens, np.float32),
        advantages=np.full(length, 1.0 if sample.index else -1.0, np.float32),
        sampler_logprobs=sample.logprobs,
        temperature=sample.params.temperature,
    )


@pytest.mark.parametrize("name", ALL)
def test_two_training_steps_run(
    name: str, tiny_tokenizer: object, make_learner: Callable[[PreTrainedModel], LocalLearner]
) -> None:
    model = build(name)
    ids = torch.arange(12)[None]
    with torch.no_grad():
        before_learning = model(input_ids=ids, use_cache=False).logits
        learner = make_learner(model)
        after = model(input_ids=ids, use_cache=False).logits
    assert torch.equal(after, before_learning), "a learner leaves the model's own forward as it was"
    learner.begin_rl()
    for samples_seen in (12, 24):
        samples = draw(model, tiny_tokenizer, SamplingParams(temperature=0.8, max_new_tokens=5))
        rows = tuple(train_row(sample, sum(len(s.token_ids) for s in samples)) for sample in samples)
        for row, scored in zip(rows, learner.score(rows, "policy"), strict=True):
            np.testing.assert_allclose(scored, row.sampler_logprobs, atol=1e-4, err_msg=row.sample_id)
        before = [parameter.detach().clone() for parameter in model.parameters()]
        learner.forward_backward(TrainBatch(rows), Objective("policy"))
        assert learner.step(samples_seen)["optim/skipped"] == 0
        moved = [not torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True)]
        assert sum(moved) > len(moved) / 2
        assert all(parameter.isfinite().all() for parameter in model.parameters())


@pytest.mark.parametrize(("name", "pads"), [*((n, True) for n in PADDED), *((n, False) for n in UNPADDED | NO_CACHE)])
def test_how_each_model_is_sampled_is_said(name: str, pads: bool, tiny_tokenizer: object) -> None:
    notes = LocalSampler(build(name), tiny_tokenizer, concurrent_samples=2).notes  # type: ignore[arg-type]
    assert any("equal length" in note for note in notes) is not pads
    assert any("recomputes" in note for note in notes) is (name in NO_CACHE)


def test_encoder_decoder_is_refused(tiny_tokenizer: object) -> None:
    size = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "vocab_size": 258}
    model = BartForConditionalGeneration(BartConfig(**size, **heads))
    with pytest.raises(ModelError, match="BartForConditionalGeneration is an encoder-decoder"):
        LocalSampler(model, tiny_tokenizer, concurrent_samples=2)  # type: ignore[arg-type]


def test_encoder_is_refused(tiny_tokenizer: object) -> None:
    with pytest.raises(ModelError, match="BertLMHeadModel attends to later tokens.*set is_decoder = true"):
        LocalSampler(BertLMHeadModel(BertConfig(**SIZE)), tiny_tokenizer, concurrent_samples=2)  # type: ignore[arg-type]


def test_model_without_head_is_refused(tiny_tokenizer: object) -> None:
    with pytest.raises(ModelError, match="LlamaModel has no language-model head"):
        LocalSampler(LlamaModel(ALL["llama"]), tiny_tokenizer, concurrent_samples=2)  # type: ignore[arg-type]
