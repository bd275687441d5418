"""Fused norms and gates: transformers' values and gradients to rounding, where they are put and where they aren't."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GemmaConfig,
    GPT2Config,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3Config,
)
from transformers.models.gemma2.modeling_gemma2 import Gemma2MLP, Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from stoker.engine.local.compiler import Library, load_library
from stoker.engine.local.fused import fuse, prepare_update
from stoker.engine.local.learner import LocalLearner
from stoker.rl.types import Objective, TrainBatch, TrainRow

Make = Callable[..., Any]
SIZE = {
    "vocab_size": 258, "hidden_size": 36, "intermediate_size": 52, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "bos_token_id": None, "eos_token_id": None,
    "pad_token_id": None, "initializer_range": 0.2,
}  # fmt: skip
HEADS = SIZE | {"head_dim": 10}
MODELS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**(SIZE | {"hidden_size": 40})),
    "qwen3": Qwen3Config(**HEADS),
    "gemma": GemmaConfig(**HEADS),
    "gemma2": Gemma2Config(**HEADS),
}
SMALL_LLAMA = LlamaConfig(hidden_size=96, intermediate_size=200, num_attention_heads=4)
SMALL_GEMMA = Gemma2Config(hidden_size=96, intermediate_size=200)
PARTS: dict[str, Callable[[], nn.Module]] = {
    "norm": lambda: LlamaRMSNorm(96),
    "norm less one": lambda: Gemma2RMSNorm(96),
    "silu": lambda: LlamaMLP(SMALL_LLAMA),
    "gelu": lambda: Gemma2MLP(SMALL_GEMMA),
}


@pytest.fixture
def library() -> Library:
    found = load_library()
    if isinstance(found, str):
        pytest.skip(found)
    return found


def shaken(module: Any) -> Any:
    """Weights of norms start at 1 or 0, which would hide them."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += 0.2 * torch.randn(parameter.shape, generator=generator)
    return module


def build(name: str) -> PreTrainedModel:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model: PreTrainedModel = shaken(AutoModelForCausalLM.from_config(copy.deepcopy(MODELS[name])).eval())
    return model


def fused(module: Any, library: Library) -> Any:
    other = copy.deepcopy(module)
    fuse(other, library)
    return other


def without_products(mlp: nn.Module) -> nn.Module:
    """Its rounding alone: the input (2, ..., W) holds the gate and what it is for."""
    mlp.gate_proj, mlp.up_proj, mlp.down_proj = _Half(0), _Half(1), nn.Identity()
    return mlp


class _Half(nn.Module):
    def __init__(self, place: int) -> None:
        super().__init__()
        self.place = place

    def forward(self, x: Tensor) -> Tensor:
        return x[self.place]


def results(module: nn.Module, x: Tensor) -> list[Tensor]:
    """The output, and the gradients of the input and the weights."""
    x = x.clone().requires_grad_()
    out = module(x)
    out.backward(torch.randn(out.shape, generator=torch.Generator().manual_seed(5)).to(out.dtype))
    return [out.detach(), x.grad, *(parameter.grad for parameter in module.parameters())]  # type: ignore[list-item]


def distance(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact.double()).norm())


@pytest.mark.parametrize("name", PARTS)
@pytest.mark.parametrize("shape", [(3, 7, 96), (331, 96), (0, 96)])
def test_values_and_gradients_are_transformers(name: str, shape: tuple[int, ...], library: Library) -> None:
    plain = shaken(PARTS[name]())
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    exact = results(copy.deepcopy(plain).double(), x.double())
    for found, expected in zip(results(fused(plain, library), x), exact, strict=True):
        torch.testing.assert_close(found.double(), expected, rtol=2e-5, atol=2e-5 * float(expected.abs().sum() ** 0.5))


@pytest.mark.parametrize("name", PARTS)
def test_bfloat16_errs_no_more_than_transformers(name: str, library: Library) -> None:
    plain = shaken(PARTS[name]()).bfloat16()
    x = torch.randn(600, 96, generator=torch.Generator().manual_seed(2)).bfloat16() * 2
    if "norm" not in name:
        plain, x = without_products(plain), x.view(2, 300, 96)
    exact = results(copy.deepcopy(plain).float(), x.float())
    for ours, theirs, expected in zip(results(fused(plain, library), x), results(plain, x), exact, strict=True):
        assert ours.dtype == torch.bfloat16
        assert distance(ours, expected) <= 1.2 * distance(theirs, expected)


@pytest.mark.parametrize("name", PARTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_apart_and_threads_change_no_bit(name: str, dtype: torch.dtype, library: Library) -> None:
    module = fused(shaken(PARTS[name]()).to(dtype), library)
    wide = torch.randn(2, 300, 150, generator=torch.Generator().manual_seed(3)).to(dtype)
    if "norm" not in name:
        module = without_products(module)
    apart, threads = wide[..., 20:116], torch.get_num_threads()
    first = results(module, apart.contiguous())
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            module.zero_grad()
            view = wide.clone().requires_grad_()
            out = module(view[..., 20:116])
            assert torch.equal(out, first[0])
            module.zero_grad()
            assert all(map(torch.equal, results(module, apart), first))
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("name", MODELS)
def test_a_whole_model(name: str, library: Library) -> None:
    model = build(name)
    ids = torch.randint(258, (3, 40), generator=torch.Generator().manual_seed(4))
    found, exact = [], []
    for each, kept in ((fused(model, library), found), (copy.deepcopy(model).double(), exact)):
        logits = each(input_ids=ids, use_cache=False).logits
        (logits * logits.detach().cos()).sum().backward()
        kept += [logits.detach().double(), *(parameter.grad.double() for parameter in each.parameters())]
    for one, other in zip(found, exact, strict=True):
        assert distance(one, other) <= 1e-4 * float(other.norm())
    other = fused(model, library)
    with torch.no_grad():
        assert torch.equal(other(input_ids=ids, use_cache=False).logits.double(), found[0])
    parts = sum("functions" in vars(type(part)) for part in other.modules())
    assert parts == {"llama": 7, "qwen3": 11, "gemma": 7, "gemma2": 11}[name]


def test_only_inputs_are_kept(library: Library) -> None:
    kept: list[int] = []
    x = torch.randn(2, 50, 96, dtype=torch.bfloat16).requires_grad_()

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor.nbytes)
        return tensor

    norm, gate = (fused(PARTS[name]().bfloat16(), library) for name in ("norm", "silu"))
    gate = without_products(gate)
    with saved_tensors_hooks(keep, lambda tensor: tensor):
        norm(x)
        assert sorted(kept) == [96 * 2, 100 * 4, x.nbytes]
        kept.clear()
        gate(x)
        assert kept == [x.nbytes // 2] * 2


def test_a_copy_in_another_type_is_transformers(library: Library) -> None:
    model = fused(build("llama"), library)
    ids = torch.arange(20)[None]
    expected = build("llama").double()(input_ids=ids).logits
    assert torch.equal(copy.deepcopy(model).double()(input_ids=ids).logits, expected)


def test_where_it_is_not_put(library: Library) -> None:
    class Own(LlamaRMSNorm):
        """Somebody's own."""

    own, other = Own(96), LlamaMLP(LlamaConfig(**SIZE | {"hidden_size": 40}, hidden_act="relu"))
    fuse(own, library)
    fuse(other, library)
    assert type(own) is Own and type(other) is LlamaMLP
    gpt2 = AutoModelForCausalLM.from_config(GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=258))
    kinds = [type(module) for module in gpt2.modules()]
    assert prepare_update(gpt2, compiled=True) == "PyTorch's operators"
    assert [type(module) for module in gpt2.modules()] == kinds


def test_the_way_off(library: Library) -> None:
    model = build("llama")
    assert prepare_update(model, compiled=False) == "PyTorch's operators"
    assert type(model.model.norm) is LlamaRMSNorm
    assert prepare_update(model, compiled=True).startswith("compiled by")
    assert isinstance(model.model.norm, LlamaRMSNorm) and type(model.model.norm) is not LlamaRMSNorm
    weights = set(build("llama").state_dict())
    assert set(model.state_dict()) == weights


@pytest.mark.parametrize("tables", [{}, {"lora": {"rank": 4}}, {"algorithm": {"name": "ppo"}}])
def test_a_learner_recomputes_to_the_same_bit(
    tables: dict[str, Any],
    make_learner: Make,
    make_rows: Callable[..., list[TrainRow]],
    gradients: Callable[..., Tensor],
    library: Library,
) -> None:
    found = []
    for gib in (None, 0.0, 0.0):
        model = build("qwen3").bfloat16()
        fuse(model, library)
        learner: LocalLearner = make_learner(model, **tables, update={"activation_gib": gib})
        learner.forward_backward(TrainBatch(tuple(make_rows(8))), Objective("policy"))
        found.append(torch.cat([gradients(learner, role) for role in learner._optimizers]))
    assert float(found[0].norm()) > 0
    assert torch.equal(found[0], found[1]) and torch.equal(found[1], found[2])
