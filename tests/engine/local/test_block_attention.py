"""Attention by blocks against PyTorch's with a mask over all pairs: values, gradients, padding, grouped heads."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    FalconConfig,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    Olmo2Config,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3Config,
)

from stoker.engine.local import forward
from stoker.engine.local.block_attention import _Attend, blocks_of
from stoker.engine.local.compiler import load_library
from stoker.engine.local.forward import ScoringModel
from stoker.engine.local.layout import collate, lines_of
from stoker.rl.types import TrainRow


def segments(*lines: tuple[int, ...]) -> Tensor:
    """Of lines with a prompt and answers of these lengths."""
    rows = [[number for number, length in enumerate(line) for _ in range(length)] for line in lines]
    longest = max(map(len, rows))
    return torch.tensor([row + [-1] * (longest - len(row)) for row in rows])


def masked(query: Tensor, key: Tensor, value: Tensor, kinds: Tensor, scale: float) -> Tensor:
    seen = ((kinds[:, None, :] == 0) | (kinds[:, :, None] == kinds[:, None, :])).tril()
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = (query @ key.transpose(-1, -2)) * scale
    return (scores.masked_fill(~seen[:, None], -torch.inf).softmax(-1) @ value).transpose(1, 2)


@pytest.mark.parametrize(
    "kinds",
    [
        segments((3, 4, 4), (3, 4, 4)),
        segments((5, 2, 7, 1), (2, 3)),  # lines of other prompts, numbers and lengths
        segments((1, 1)),
        segments((4, 6, 0, 2), (9, 1, 1, 1)),  # an answer of which nothing is fed
        segments((4, 0, 0), (2, 0)),  # and none of which anything is
    ],
)
@pytest.mark.parametrize("compiled", [False, True])
def test_values_and_gradients_are_those_of_a_mask(kinds: Tensor, compiled: bool) -> None:
    library = load_library() if compiled else None
    if isinstance(library, str):
        pytest.skip(library)
    generator = torch.Generator().manual_seed(0)
    lines, length = kinds.shape
    tensors = [
        torch.randn(lines, heads, length, 8, generator=generator, dtype=torch.float32).requires_grad_()
        for heads in (6, 2, 2)
    ]
    real = (kinds >= 0)[:, :, None, None]
    blocks = blocks_of(kinds, (lines, length), torch.float32, library)
    assert blocks is not None
    found = _Attend.apply(*tensors, blocks, 0.3)
    expected = masked(*tensors, kinds.where(kinds >= 0, 0), 0.3) * real
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)
    weights = torch.randn(found.shape, generator=generator)  # padding's gradient must not count
    ours = torch.autograd.grad(found, tensors, weights, retain_graph=True)
    theirs = torch.autograd.grad(expected, tensors, weights)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, atol=2e-6, rtol=0)


def test_a_line_of_one_answer_is_causal() -> None:
    tensors = [torch.randn(3, heads, 7, 4).requires_grad_() for heads in (4, 2, 2)]
    blocks = blocks_of(None, (3, 7), torch.float32)
    assert blocks is not None
    found = _Attend.apply(*tensors, blocks, 0.5)
    torch.testing.assert_close(found, masked(*tensors, torch.zeros(3, 7), 0.5), atol=1e-6, rtol=0)


@pytest.mark.parametrize(("dtype", "longest"), [(torch.float32, 192), (torch.bfloat16, 1024), (torch.float16, 0)])
def test_long_blocks_are_left_to_pytorch(dtype: torch.dtype, longest: int) -> None:
    assert blocks_of(None, (2, longest + 1), dtype) is None
    assert longest == 0 or blocks_of(None, (2, longest), dtype) is not None


SIZE = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
GROUPS = SIZE | {"num_key_value_heads": 2}


def build(config: PreTrainedConfig) -> PreTrainedModel:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()


def rows() -> list[TrainRow]:
    random = np.random.default_rng(1)
    found = []
    for prompt, answers in ((5, (3, 6, 1)), (2, (4, 4))):
        ids = tuple(random.integers(0, 64, prompt).tolist())
        for length in answers:
            tokens = random.integers(0, 64, length).astype(np.int32)
            numbers = random.normal(size=length).astype(np.float32)
            found.append(TrainRow("", ids, tokens, np.ones(length, np.bool_), numbers, numbers, numbers))
    return found


def scores_and_gradient(model: PreTrainedModel, *, by_blocks: bool, monkeypatch: Any) -> tuple[Tensor, list[Tensor]]:
    scoring = ScoringModel(model, 64)
    used: list[bool] = []
    real = forward.blocks_of

    def spy(*given: Any) -> Any:
        used.append(True)
        return real(*given) if by_blocks else None

    monkeypatch.setattr(forward, "blocks_of", spy)
    some = rows()
    logprobs = scoring(collate(some, lines_of(some, 100, 32), model.device)).logprobs
    gradient = torch.autograd.grad(logprobs.square().sum(), [p for p in model.parameters() if p.requires_grad])
    monkeypatch.setattr(forward, "blocks_of", real)
    assert used
    return logprobs, list(gradient)


@pytest.mark.parametrize("config", [LlamaConfig(**GROUPS), Qwen3Config(**GROUPS, head_dim=8), LlamaConfig(**SIZE)])
@pytest.mark.parametrize("recompute", [False, True])
def test_a_model_by_blocks_is_the_same_model(
    config: PreTrainedConfig, recompute: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build(config)
    if recompute:
        model.activation_checkpointing_enable()
        model.train()
    found, gradient = scores_and_gradient(model, by_blocks=True, monkeypatch=monkeypatch)
    expected, other = scores_and_gradient(model, by_blocks=False, monkeypatch=monkeypatch)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    for one, two in zip(gradient, other, strict=True):
        torch.testing.assert_close(one, two, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    "config", [GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=2), Gemma3TextConfig(**GROUPS, head_dim=8)]
)
def test_other_models_keep_their_attention(config: PreTrainedConfig) -> None:
    model = build(config)
    scoring = ScoringModel(model, 64)
    some = rows()
    assert scoring(collate(some, lines_of(some, 100, scoring.sharing_width), model.device)).logprobs.isfinite().all()


def test_a_model_that_asks_for_the_name_of_its_attention_is_left_as_it_was() -> None:
    model = build(FalconConfig(**SIZE))
    ids = torch.arange(12)[None]
    before = model(input_ids=ids).logits
    assert not ScoringModel(model, 64)._by_blocks
    assert model.config._attn_implementation == "sdpa"
    assert torch.equal(model(input_ids=ids).logits, before)


def test_a_manifest_tells_what_attention_is_computed_by() -> None:
    by_blocks, plain = build(Olmo2Config(**GROUPS)), build(FalconConfig(**SIZE))
    library = load_library()
    expected = "PyTorch's operators" if isinstance(library, str) else f"compiled by {library.compiler}"
    assert ScoringModel(by_blocks, 64, compiled=True).arithmetic == expected
    assert ScoringModel(by_blocks, 64).arithmetic == "PyTorch's operators"
    assert ScoringModel(plain, 64, compiled=True).arithmetic == "PyTorch's operators"


def test_the_users_choice_of_attention_stays() -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**GROUPS), attn_implementation="eager").eval()
    assert not ScoringModel(model, 64)._by_blocks
    assert model.config._attn_implementation == "eager"


def test_a_saved_model_names_no_attention_of_ours(tmp_path: Any) -> None:
    model = build(LlamaConfig(**GROUPS))
    assert ScoringModel(model, 64)._by_blocks
    model.save_pretrained(tmp_path)
    assert "stoker" not in (tmp_path / "config.json").read_text()
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert isinstance(again, nn.Module) and again.config._attn_implementation == "sdpa"
