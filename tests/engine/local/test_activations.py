"""Recomputed layers: the same gradient to the last bit, as few of them as the limit allows, bytes as promised."""

import copy
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    MambaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3MoeConfig,
)

from stoker.engine.local import activations
from stoker.engine.local.activations import GIB, ActivationLimit, Bytes, Cost
from stoker.engine.local.forward import ScoringModel
from stoker.engine.local.layout import Microbatch, collate
from stoker.engine.local.learner import LocalLearner
from stoker.engine.local.load import cast_weights
from stoker.errors import ModelError
from stoker.rl.types import Objective, TrainBatch, TrainRow

Make = Callable[..., Any]
POLICY = Objective("policy", entropy_coefficient=0.1)
LAYERS = 5
SIZE = {
    "vocab_size": 258, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": LAYERS,
    "num_attention_heads": 4, "max_position_embeddings": 512, "bos_token_id": None, "eos_token_id": 256,
    "pad_token_id": None, "initializer_range": 0.2,
}  # fmt: skip
GROUPED = SIZE | {"num_key_value_heads": 2}
MODELS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**GROUPED),
    "llama_eager": LlamaConfig(**GROUPED, attn_implementation="eager"),
    "gpt2": GPT2Config(**SIZE, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0),
    "gemma3": Gemma3TextConfig(**GROUPED, head_dim=8, sliding_window=8),
    "qwen3_moe": Qwen3MoeConfig(**GROUPED, num_experts_per_tok=2, moe_intermediate_size=24, head_dim=8, num_experts=4),
    "mamba": MambaConfig(**SIZE, state_size=8),
}  # fmt: skip
CASES = [(name, {}) for name in MODELS] + [(name, {"lora": {"rank": 4, "alpha": 8.0}}) for name in ("llama", "gpt2")]


def build(name: str) -> PreTrainedModel:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(copy.deepcopy(MODELS[name])).eval()


def long_rows(make_rows: Make, prompts: int) -> list[TrainRow]:
    """Twelve rows of six groups, or of as many prompts as rows: shared lines, or none."""
    rows = make_rows(12, seed=4)
    heads = [(tuple(range(40 + place)), f"s:{place}") for place in range(prompts)]
    return [
        replace(row, prompt_ids=heads[place % prompts][0], sample_id=f"{heads[place % prompts][1]}/{place}")
        for place, row in enumerate(rows)
    ]


def wake(learner: LocalLearner) -> LocalLearner:
    """Adapters that do something: fresh ones are zero, and so is half of their gradient."""
    generator = torch.Generator().manual_seed(1)
    if learner._adapters is not None:
        for parameter in learner._adapters.parameters.values():
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.1
    return learner


@contextmanager
def saved(model: nn.Module) -> Iterator[dict[int, torch.UntypedStorage]]:
    """All storages but the model's own that the forward passes inside leave for a backward pass."""
    own = {tensor.untyped_storage().data_ptr() for tensor in chain(model.parameters(), model.buffers())}
    found: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        yield found


def saved_bytes(learner: LocalLearner, micro: Microbatch) -> int:
    """Of one forward of an update."""
    limit = learner._limits["policy"]
    with limit.training():
        limit.apply(micro, 1.0)
        with saved(learner._model) as found:
            learner._policy(micro)
    return sum(storage.nbytes() for storage in found.values())


# -- arithmetic --------------------------------------------------------------------------------------


def test_bytes_by_hand() -> None:
    found = Bytes.through({4: 4 * 10 + 16 * 3, 2: 2 * 10 + 4 * 3})
    assert found == Bytes(10.0, 3.0)
    assert found.of(2, 5) == 2 * (5 * 10 + 25 * 3)
    assert Bytes.through({2: 7, 4: 7}) == Bytes(7 / 4, 0.0), "a constant must not shrink with the square of the length"


def test_as_few_layers_as_needed_by_hand(tiny_llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four layers of 100 bytes a token, or 10 recomputed. 10 tokens: 4000, 3100, 2200, 1300, 400 bytes."""
    layers = [nn.Identity() for _ in range(4)]
    costs = {layer: Cost(Bytes(100.0, 0.0), Bytes(10.0, 0.0)) for layer in layers}
    monkeypatch.setattr(activations, "_measure", lambda *_: costs)
    limit = ActivationLimit(tiny_llama, ScoringModel(tiny_llama, 64), 2500 / GIB)
    assert limit.plan(1, 10) == (2, 2200)
    assert limit.plan(2, 5) == (2, 2200)
    assert limit.plan(1, 6) == (0, 2400), "a smaller micro-batch recomputes less"
    assert limit.plan(1, 100) == (4, 4000), "no more than all"
    assert limit.plan(1, 5, share=0.5) == (2, 1100), "lack of memory halves the bytes, not only the tokens"
    assert limit.notes(10, 5) == [
        "update.activation_gib = 2.32831e-06: 2 of 4 layers of LlamaForCausalLM recompute in a micro-batch of 2 x 5 "
        "tokens, and 2.05e-06 GiB are kept"
    ]
    assert "lower update.tokens_per_microbatch" in limit.notes(100, 100)[0]


def test_without_a_limit_nothing_is_measured_or_told(tiny_llama: PreTrainedModel, make_learner: Make) -> None:
    learner = make_learner(tiny_llama)
    assert not learner._limits["policy"]._costs
    assert learner.notes == []


# -- the gradient ------------------------------------------------------------------------------------


@pytest.mark.parametrize("prompts", [6, 12])
@pytest.mark.parametrize(("name", "tables"), CASES)
@pytest.mark.filterwarnings("ignore:.*fast path is not available")
def test_the_gradient_is_the_same_to_the_last_bit(
    name: str,
    tables: dict[str, Any],
    prompts: int,
    make_learner: Make,
    make_rows: Make,
    gradients: Make,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows, found, counts = long_rows(make_rows, prompts), [], []
    plan = ActivationLimit.plan

    def counting(self: ActivationLimit, *args: Any, **kwargs: Any) -> tuple[int, float]:
        counts.append(plan(self, *args, **kwargs)[0])
        return plan(self, *args, **kwargs)

    monkeypatch.setattr(ActivationLimit, "plan", counting)
    for gib in (None, 0.0, 1.5e-3, 8e-4):
        update = {"tokens_per_microbatch": 200} | ({} if gib is None else {"activation_gib": gib})
        learner = wake(make_learner(build(name), update=update, **tables))
        learner.forward_backward(TrainBatch(tuple(rows)), POLICY)
        found.append(gradients(learner))
        assert not learner._model.training
    assert any(0 < count < LAYERS for count in counts), f"{counts}: the last limits are between the first two"
    assert found[0].abs().max() > 0
    assert all(torch.equal(one, found[0]) for one in found)


def test_the_critics_gradient_too(make_learner: Make, make_rows: Make, gradients: Make) -> None:
    rows, found = long_rows(make_rows, 6), []
    for gib in (None, 0.0, 1.5e-3):
        learner = make_learner(build("llama"), algorithm={"name": "ppo"}, update={"activation_gib": gib})
        learner.forward_backward(TrainBatch(tuple(rows)), POLICY)
        found.append(torch.cat([gradients(learner), gradients(learner, "critic")]))
    assert all(torch.equal(one, found[0]) for one in found)
    assert len([note for note in learner.notes if "activation_gib" in note]) == 2


# -- the bytes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("prompts", [3, 12])
@pytest.mark.parametrize(("name", "tables"), [case for case in CASES if case[0] != "mamba"])
def test_saved_bytes_fall_as_promised(
    name: str, tables: dict[str, Any], prompts: int, make_learner: Make, make_rows: Make
) -> None:
    """What a whole forward saves falls by what the arithmetic says, with the fewest layers that meet the limit."""
    rows = long_rows(make_rows, prompts)
    plain = wake(make_learner(build(name), **tables))
    micro = collate(rows, next(plain._budget.microbatches(rows, plain._policy.sharing_width)), torch.device("cpu"))
    lines, length = micro.token_ids.shape
    shared = micro.segments is not None
    assert shared == (prompts == 3 and bool(plain._policy.sharing_width))
    most = saved_bytes(plain, micro)

    limited = wake(make_learner(build(name), update={"activation_gib": 0.0}, **tables))
    limit, counts = limited._limits["policy"], []
    _, least = limit.plan(lines, length, shared=shared)
    limit._limit = 1e18
    _, all_kept = limit.plan(lines, length, shared=shared)
    for part in (0.0, 0.3, 0.5, 0.95):
        limit._limit = least + part * (all_kept - least)
        count, kept = limit.plan(lines, length, shared=shared)
        counts.append(count)
        fallen = most - saved_bytes(limited, micro)
        assert kept <= limit._limit * (1 + 1e-9)
        # With no layer left to save mask and positions, which recomputed ones hold without saving, a little more falls.
        assert fallen >= 0.98 * (all_kept - kept)
        assert count == LAYERS or fallen <= 1.02 * (all_kept - kept)
        assert [layer.gradient_checkpointing for layer in limit._costs[shared]] == [n < count for n in range(LAYERS)]
        if count:
            costs = list(limit._costs[shared].values())
            last = costs[count - 1]
            assert kept - last.recomputed.of(lines, length) + last.kept.of(lines, length) > limit._limit
    assert counts == [LAYERS, 4, 3, 1]
    assert most - all_kept < 0.25 * most, "the layers are most of it"


def test_measuring_leaves_no_trace(make_learner: Make) -> None:
    model = build("llama")
    before = torch.get_rng_state()
    one, other = (make_learner(model, update={"activation_gib": 0.001})._limits["policy"] for _ in range(2))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert one._costs == other._costs
    assert {type(layer).__name__ for layer in one._costs[False]} == {"LlamaDecoderLayer"}
    gc.collect()


# -- when it doesn't fit -----------------------------------------------------------------------------


def test_failure_19_out_of_memory_with_recomputed_layers(
    make_learner: Make, make_rows: Make, gradients: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The micro-batch halves, the limit with it: the same layers recompute, so half the bytes are kept."""
    rows = TrainBatch(tuple(long_rows(make_rows, 12)))
    wanted = make_learner(build("llama"), update={"tokens_per_microbatch": 250})
    wanted.forward_backward(rows, POLICY)

    unlimited = make_learner(build("llama"), update={"activation_gib": 1e9})
    gib = unlimited._limits["policy"].plan(5, 50)[1] / 2 / GIB
    learner = make_learner(build("llama"), update={"tokens_per_microbatch": 250, "activation_gib": gib})
    score, kept, plan = ScoringModel.__call__, [], ActivationLimit.plan

    def planned(self: ActivationLimit, lines: int, length: int, **kwargs: Any) -> tuple[int, float]:
        kept.append(plan(self, lines, length, **kwargs))
        return kept[-1]

    def fails_once(self: ScoringModel, micro: Microbatch) -> Any:
        if learner._budget.tokens == 250 and len(kept) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return score(self, micro)

    monkeypatch.setattr(ActivationLimit, "plan", planned)
    monkeypatch.setattr(ScoringModel, "__call__", fails_once)
    learner.forward_backward(rows, POLICY)
    found, expected = gradients(learner), gradients(wanted)
    assert float((found - expected).norm() / expected.norm()) <= 5e-6
    assert learner._budget.tokens <= 125
    assert max(size for _, size in kept[:2]) <= gib * GIB
    assert max(size for _, size in kept[2:]) <= gib * GIB / 2
    assert 0 < max(count for count, _ in kept[:2]) <= max(count for count, _ in kept) < LAYERS

    fresh = make_learner(build("llama"), update={"tokens_per_microbatch": 250, "activation_gib": gib})
    fresh.restore(learner.state())
    assert fresh._budget.share == learner._budget.share


def test_a_model_that_cannot_recompute_is_refused(make_learner: Make) -> None:
    model = build("llama")
    model.supports_gradient_checkpointing = False
    with pytest.raises(ModelError, match=r"activation_gib is set.*LlamaForCausalLM.*leave the key out"):
        make_learner(model, update={"activation_gib": 1.0})


# -- scoring has the update's passes -----------------------------------------------------------------


def test_a_reference_is_scored_by_the_passes_of_an_update(
    make_learner: Make, make_rows: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same lines, cuts and scored positions, so that even in bfloat16 the first KL is 0, tokens out or not."""
    rows = long_rows(make_rows, 6)
    rows = [replace(row, mask=row.mask & ((index % 3 > 0) & (row.token_ids % 4 > 0))) for index, row in enumerate(rows)]
    learner = make_learner(
        cast_weights(build("llama"), torch.bfloat16),
        kl={"coefficient": 0.1},
        update={"tokens_per_microbatch": 120, "logits_per_chunk": 16},
    )
    learner.begin_rl()
    passes: list[list[int]] = []
    score = ScoringModel.__call__

    def watched(self: ScoringModel, micro: Microbatch) -> Any:
        passes.append([*micro.token_ids.flatten().tolist(), *micro.sources.tolist()])
        with saved(self.model) as found:
            scores = score(self, micro)
        assert torch.is_grad_enabled() or not found
        return scores

    monkeypatch.setattr(ScoringModel, "__call__", watched)
    reference = learner.score(rows, "reference")
    scored, passes[:] = list(passes), []
    assert all((values[~row.mask] == 0).all() for row, values in zip(rows, reference, strict=True))
    assert all((values[row.mask] < 0).all() for row, values in zip(rows, reference, strict=True))
    rows = [replace(row, reference_logprobs=values) for row, values in zip(rows, reference, strict=True)]
    metrics = learner.forward_backward(TrainBatch(tuple(rows)), replace(POLICY, kl_coefficient=0.1))
    assert passes == scored
    assert len(passes) > 1
    assert metrics["kl/mean"] == metrics["kl/loss"] == 0
