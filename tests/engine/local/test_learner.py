"""Gradients against plain autograd, and their independence of how rows are cut into micro-batches."""

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from stoker.engine.local import learner as learner_module
from stoker.engine.local.forward import ScoringModel
from stoker.engine.local.learner import LocalLearner
from stoker.engine.local.load import cast_weights
from stoker.errors import RunError
from stoker.rl.types import KeptTokens, Objective, Sample, TrainBatch, TrainRow

Make = Callable[..., Any]
POLICY = Objective("policy")


FP32_ROUNDING = 5e-6
"""Relative distance of two gradients that are equal but for the order of additions, which threads change; a wrong
denominator, mask or shift is off by far more, and the fp64 cases below hold 1e-12."""


def plain_logprobs(model: PreTrainedModel, row: TrainRow) -> tuple[Tensor, Tensor]:
    """(T,) log-probs and entropy of one row alone, from the model's own logits."""
    ids = torch.tensor([[*row.prompt_ids, *row.token_ids.tolist()]])
    start = len(row.prompt_ids) - 1
    z = model(input_ids=ids).logits[0, start:-1].float() / row.temperature
    full = z.log_softmax(-1)
    entropy = -(full.exp() * full).sum(-1)
    if row.kept is not None:
        keep = torch.zeros_like(z, dtype=torch.bool)
        for t, (a, b) in enumerate(zip(row.kept.offsets, row.kept.offsets[1:], strict=False)):
            keep[t, torch.from_numpy(row.kept.ids[a:b]).long()] = True
        full = z.masked_fill(~keep, -torch.inf).log_softmax(-1)
    return full.gather(1, torch.tensor(row.token_ids).long()[:, None])[:, 0], entropy


def plain_gradient(model: PreTrainedModel, rows: list[TrainRow], entropy_coefficient: float = 0.0) -> Tensor:
    """Of sum w (-A log p - c H): what the clipped surrogate's gradient is on-policy."""
    total = torch.zeros(())
    for row in rows:
        logprobs, entropy = plain_logprobs(model, row)
        loss = -torch.from_numpy(row.advantages) * logprobs - entropy_coefficient * entropy
        total = total + (torch.from_numpy(row.weights) * loss)[torch.from_numpy(row.mask)].sum()
    return torch.cat([g.flatten() for g in torch.autograd.grad(total, list(model.parameters()))])


@pytest.mark.parametrize("entropy_coefficient", [0.0, 0.1])
@pytest.mark.parametrize("truncated", [False, True])
def test_gradient_equals_plain_autograd_row_by_row(
    tiny_llama: PreTrainedModel, make_learner: Make, make_rows: Make, gradients: Make,
    entropy_coefficient: float, truncated: bool,
) -> None:  # fmt: skip
    rows = make_rows(temperature=0.7)
    if truncated:
        rows = [replace(row, kept=kept_around(row)) for row in rows]
    expected = plain_gradient(tiny_llama, rows, entropy_coefficient)
    learner = make_learner(tiny_llama, update={"logits_per_chunk": 5})
    learner.forward_backward(TrainBatch(tuple(rows)), replace(POLICY, entropy_coefficient=entropy_coefficient))
    assert distance(gradients(learner), expected) <= FP32_ROUNDING


def kept_around(row: TrainRow) -> KeptTokens:
    """The token and its two neighbours at each position."""
    ids = np.concatenate([[(t - 1) % 256, t, (t + 1) % 256] for t in row.token_ids]).astype(np.int32)
    return KeptTokens(ids, np.arange(0, len(ids) + 1, 3, dtype=np.int32))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, FP32_ROUNDING), (torch.float64, 1e-12)])
@pytest.mark.parametrize("budget", [1, 13, 40])
def test_peer_fault_01_and_05_gradient_is_invariant_to_micro_batches(
    tiny_llama: PreTrainedModel, make_learner: Make, make_rows: Make, gradients: Make,
    budget: int, dtype: torch.dtype, tolerance: float,
) -> None:  # fmt: skip
    """Uneven rows, against all in one micro-batch; budget 1 puts each row alone; metrics don't move either."""
    rows, model = tuple(make_rows()), cast_weights(tiny_llama, dtype)
    whole = make_learner(model)
    expected_metrics = whole.forward_backward(TrainBatch(rows), POLICY)
    expected = gradients(whole)
    whole._optimizers["policy"].zero()  # both learners share the model
    split = make_learner(model, update={"tokens_per_microbatch": budget})
    metrics = split.forward_backward(TrainBatch(rows), POLICY)
    assert metrics["batch/microbatches"] > expected_metrics["batch/microbatches"] == 1
    assert distance(gradients(split), expected) <= tolerance
    moved = {"batch/microbatches", "batch/padding", "batch/tokens_per_microbatch"}
    for key in metrics.keys() - moved:
        assert metrics[key] == pytest.approx(expected_metrics[key], rel=1e-5, abs=1e-6), key


def distance(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def test_peer_fault_05_two_calls_add_up_to_one(
    tiny_llama: PreTrainedModel, make_learner: Make, make_rows: Make, gradients: Make
) -> None:
    rows = tuple(make_rows())
    learner = make_learner(tiny_llama)
    learner.forward_backward(TrainBatch(rows), POLICY)
    expected = gradients(learner)
    learner._optimizers["policy"].zero()
    learner.forward_backward(TrainBatch(rows[:2]), POLICY)
    learner.forward_backward(TrainBatch(rows[2:]), POLICY)
    assert distance(gradients(learner), expected) <= FP32_ROUNDING


def test_peer_fault_08_mask_sum_is_true_length_and_eos_learns_where_pad_is_eos(
    tiny_llama: PreTrainedModel, make_learner: Make, make_rows: Make, gradients: Make
) -> None:
    """Pad id == EOS id, and only the final EOS has an advantage: its gradient must be there, and alone."""
    eos = 256
    tiny_llama.config.pad_token_id = tiny_llama.generation_config.pad_token_id = eos
    rows = make_rows(3)
    long = np.full(9, 7, dtype=np.int32)
    ended = replace(
        rows[0],
        token_ids=np.array([5, 6, eos], dtype=np.int32),
        mask=np.ones(3, dtype=np.bool_),
        weights=np.ones(3, dtype=np.float32),
        advantages=np.array([0, 0, 1], dtype=np.float32),
        sampler_logprobs=np.zeros(3, dtype=np.float32),
    )
    neighbour = replace(
        ended, token_ids=long, mask=np.ones(9, dtype=np.bool_), weights=np.full(9, 1e-20, dtype=np.float32),
        advantages=np.ones(9, dtype=np.float32), sampler_logprobs=np.zeros(9, dtype=np.float32),
    )  # fmt: skip
    expected = plain_gradient(tiny_llama, [ended])
    assert expected.abs().max() > 0
    learner = make_learner(tiny_llama)
    learner.forward_backward(TrainBatch((ended, neighbour)), POLICY)
    assert distance(gradients(learner), expected) <= FP32_ROUNDING
    assert [len(one) for one in learner.score([ended, neighbour], "policy")] == [3, 9]


def test_score_keeps_row_order_and_equals_plain_logprobs(
    tiny_llama: PreTrainedModel, make_learner: Make, make_rows: Make
) -> None:
    rows = make_rows(temperature=0.6)
    learner = make_learner(tiny_llama, update={"tokens_per_microbatch": 25})
    for row, found in zip(rows, learner.score(rows, "policy"), strict=True):
        expected = plain_logprobs(tiny_llama, row)[0].detach().numpy()
        np.testing.assert_allclose(found, expected, atol=1e-5)


def test_interior_masked_tokens_are_scored_but_carry_no_gradient(
    tiny_llama: PreTrainedModel, make_learner: Make, make_rows: Make, gradients: Make
) -> None:
    (row,) = make_rows(1, seed=3)
    mask = np.ones(len(row.token_ids), dtype=np.bool_)
    mask[1] = False
    row = replace(row, mask=mask, advantages=np.where(mask, row.advantages, np.nan).astype(np.float32))
    learner = make_learner(tiny_llama)
    learner.forward_backward(TrainBatch((row,)), POLICY)
    clean = replace(row, advantages=np.nan_to_num(row.advantages), weights=row.weights * mask)
    assert distance(gradients(learner), plain_gradient(tiny_llama, [clean])) <= FP32_ROUNDING
    assert len(learner.score([row], "policy")[0]) == len(mask)


def test_rows_without_advantage_change_nothing_but_are_stepped_over(
    tiny_llama: PreTrainedModel, make_learner: Make, make_rows: Make, gradients: Make
) -> None:
    rows = make_rows()
    flat = [replace(row, advantages=np.zeros_like(row.advantages)) for row in rows[:3]]
    learner = make_learner(tiny_llama, update={"tokens_per_microbatch": 1})
    metrics = learner.forward_backward(TrainBatch((*flat, *rows[3:])), POLICY)
    assert metrics["batch/microbatches"] == 3
    assert distance(gradients(learner), plain_gradient(tiny_llama, rows[3:])) <= FP32_ROUNDING


def test_batch_that_carries_no_gradient_steps_by_momentum_as_if_computed(
    tiny_llama: PreTrainedModel, make_learner: Make, make_rows: Make
) -> None:
    learner = make_learner(tiny_llama)
    rows = make_rows()
    learner.forward_backward(TrainBatch(tuple(rows)), POLICY)
    learner.step(1)
    before = tiny_llama.lm_head.weight.detach().clone()
    learner.forward_backward(TrainBatch(tuple(replace(r, advantages=r.advantages * 0) for r in rows)), POLICY)
    metrics = learner.step(2)
    assert metrics["optim/grad_norm"] == 0
    assert not torch.equal(before, tiny_llama.lm_head.weight)


def test_peer_fault_19_kl_to_the_reference_is_zero_at_step_0(
    tiny_llama: PreTrainedModel, make_learner: Make, make_rows: Make
) -> None:
    learner = make_learner(tiny_llama, kl={"coefficient": 0.1})
    with pytest.raises(RunError, match="begin_rl"):
        learner.score(make_rows(), "reference")
    learner.begin_rl()
    rows = make_rows()
    rows = [replace(r, reference_logprobs=q) for r, q in zip(rows, learner.score(rows, "reference"), strict=True)]
    metrics = learner.forward_backward(TrainBatch(tuple(rows)), replace(POLICY, kl_coefficient=0.1))
    assert metrics["kl/mean"] == pytest.approx(0, abs=1e-6)
    assert metrics["kl/loss"] == pytest.approx(0, abs=1e-6)
    learner.step(1)
    moved = learner.score(rows, "policy")
    still = learner.score(rows, "reference")
    assert max(np.abs(a - b).max() for a, b in zip(moved, still, strict=True)) > 1e-3
    np.testing.assert_allclose(still[0], rows[0].reference_logprobs, atol=1e-6)


def test_no_reference_in_memory_without_a_leash(tiny_llama: PreTrainedModel, make_learner: Make) -> None:
    learner = make_learner(tiny_llama)
    learner.begin_rl()
    assert learner._reference is None


def test_bfloat16_gradients_are_summed_in_fp32(
    tiny_llama: PreTrainedModel, make_learner: Make, make_rows: Make, gradients: Make
) -> None:
    """The sum over micro-batches equals, bit for bit, the fp32 sum of each one's bf16 gradient."""
    rows = make_rows(24)
    learner = make_learner(cast_weights(tiny_llama, torch.bfloat16), update={"tokens_per_microbatch": 1})
    alone = []
    for row in sorted(rows, key=lambda row: -len(row.prompt_ids) - len(row.token_ids)):
        learner.forward_backward(TrainBatch((row,)), POLICY)
        alone.append(gradients(learner))
        assert torch.equal(alone[-1], alone[-1].bfloat16().float())
        learner._optimizers["policy"].zero()
    learner.forward_backward(TrainBatch(tuple(rows)), POLICY)
    expected = alone[0]
    for one in alone[1:]:
        expected = expected + one
    assert torch.equal(gradients(learner), expected)
    assert all(parameter.grad is None for parameter in tiny_llama.parameters())


def test_float16_keeps_the_gradient_of_a_loss_over_very_many_tokens(
    tiny_llama: PreTrainedModel, make_learner: Make, make_rows: Make, gradients: Make
) -> None:
    rows = [replace(row, weights=row.weights * np.float32(1e-7)) for row in make_rows()]
    expected = plain_gradient(tiny_llama, rows)
    learner = make_learner(cast_weights(tiny_llama, torch.float16))
    learner.forward_backward(TrainBatch(tuple(rows)), POLICY)
    assert distance(gradients(learner), expected) < 0.05


def test_activation_checkpointing_leaves_the_gradient(
    tiny_llama: PreTrainedModel, make_learner: Make, make_rows: Make, gradients: Make
) -> None:
    rows = make_rows()
    expected = plain_gradient(tiny_llama, rows)
    learner = make_learner(tiny_llama, update={"activation_gib": 0.0})
    learner.forward_backward(TrainBatch(tuple(rows)), POLICY)
    assert distance(gradients(learner), expected) <= FP32_ROUNDING
    assert not tiny_llama.training


# -- memory ----------------------------------------------------------------------------------------


def failing_above(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Collating more than `limit` padded tokens raises what a full GPU raises, after the first micro-batch ran."""
    collate = learner_module.collate

    def small_only(*args: Any, **kwargs: Any) -> Any:
        micro = collate(*args, **kwargs)
        if micro.token_ids.numel() > limit:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return micro

    monkeypatch.setattr(learner_module, "collate", small_only)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_failure_19_out_of_memory_in_update(
    tiny_llama: PreTrainedModel, make_learner: Make, make_rows: Make, gradients: Make,
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype,
) -> None:  # fmt: skip
    """The third micro-batch of a call fails; gradients of the call before must survive, its own must not stay twice."""
    model = cast_weights(tiny_llama, dtype)
    first, second = make_rows(6, seed=0), make_rows(9, seed=1)
    wanted = make_learner(copy.deepcopy(model), update={"tokens_per_microbatch": 45})
    for rows in (first, second):
        wanted.forward_backward(TrainBatch(tuple(rows)), POLICY)
    expected = gradients(wanted)

    learner = make_learner(model, update={"tokens_per_microbatch": 45})
    learner.forward_backward(TrainBatch(tuple(first)), POLICY)
    score = ScoringModel.__call__
    calls = []

    def fails_at_third(self: ScoringModel, micro: Any) -> Any:
        calls.append(micro.token_ids.shape)
        if len(calls) == 3 and micro.token_ids.shape[0] > 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return score(self, micro)

    monkeypatch.setattr(ScoringModel, "__call__", fails_at_third)
    learner.forward_backward(TrainBatch(tuple(second)), POLICY)
    assert distance(gradients(learner), expected) <= (FP32_ROUNDING if dtype == torch.float32 else 0.05)
    smaller = learner.state()["tokens_per_microbatch"]
    assert smaller < 45
    assert "memory ran out" in learner._budget.notes[-1]
    fresh = make_learner(copy.deepcopy(model), update={"tokens_per_microbatch": 45})
    fresh.restore(learner.state())
    assert fresh.state() == learner.state()
    changed = make_learner(copy.deepcopy(model), update={"tokens_per_microbatch": 30})
    changed.restore(learner.state())
    assert changed.state() == {"tokens_per_microbatch": 30, "configured": 30}, "a new number in the run file counts"


def test_failure_19_single_row_that_does_not_fit(
    tiny_llama: PreTrainedModel, make_learner: Make, make_rows: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = make_learner(tiny_llama)
    failing_above(10, monkeypatch)
    with pytest.raises(RunError, match=r"one row of \d+ tokens.*activation_gib"):
        learner.forward_backward(TrainBatch(tuple(make_rows())), POLICY)


def test_failure_19_other_errors_are_not_read_as_lack_of_memory(
    tiny_llama: PreTrainedModel, make_learner: Make, make_rows: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = make_learner(tiny_llama)

    def broken(self: ScoringModel, micro: Any) -> Any:
        raise RuntimeError("shape mismatch")

    monkeypatch.setattr(ScoringModel, "__call__", broken)
    with pytest.raises(RuntimeError, match="shape mismatch"):
        learner.forward_backward(TrainBatch(tuple(make_rows())), POLICY)
    assert not tiny_llama.training


def test_score_shrinks_too(
    tiny_llama: PreTrainedModel, make_learner: Make, make_rows: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = make_rows()
    expected = make_learner(tiny_llama).score(rows, "policy")
    learner = make_learner(tiny_llama)
    failing_above(45, monkeypatch)
    for one, other in zip(learner.score(rows, "policy"), expected, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)
    assert learner.state()["tokens_per_microbatch"] < 60


# -- refusals --------------------------------------------------------------------------------------


def test_failure_07_nan_gradient_makes_no_update(
    tiny_llama: PreTrainedModel, make_learner: Make, make_rows: Make
) -> None:
    learner = make_learner(tiny_llama)
    rows = make_rows()
    before = [p.detach().clone() for p in tiny_llama.parameters()]
    rows[2] = replace(rows[2], advantages=rows[2].advantages * np.float32("nan"))
    learner.forward_backward(TrainBatch(tuple(rows)), POLICY)
    metrics = learner.step(1)
    assert metrics["optim/skipped"] == 1
    assert "isn't finite" in learner.refusal
    assert "s:2/0" in learner.refused_samples
    assert all(torch.equal(a, b) for a, b in zip(before, tiny_llama.parameters(), strict=True))
    learner.forward_backward(TrainBatch(tuple(make_rows())), POLICY)
    assert learner.step(2)["optim/skipped"] == 0
    assert learner.refusal == ""


def test_failure_08_gradient_spike_is_skipped_and_named(
    tiny_llama: PreTrainedModel, make_learner: Make, make_rows: Make
) -> None:
    optimizer = {"learning_rate": 1e-6, "warmup_fraction": 0.0, "skip_grad_norm_ratio": 5.0}
    learner = make_learner(tiny_llama, optimizer=optimizer)
    rows = make_rows()
    silent = [replace(row, weights=row.weights * 0) for row in rows]
    for _ in range(8):
        for some in (rows, silent, silent):  # updates that teach nothing say nothing of the usual norm
            learner.forward_backward(TrainBatch(tuple(some)), POLICY)
            assert learner.step(1)["optim/skipped"] == 0
    spiky = [replace(row, weights=row.weights * 100) for row in rows]
    learner.forward_backward(TrainBatch(tuple(spiky)), POLICY)
    assert learner.step(1)["optim/skipped"] == 1
    assert "times its running median" in learner.refusal
    assert learner.refused_samples == tuple(row.sample_id for row in rows)


def test_clipping_is_by_the_global_norm(tiny_llama: PreTrainedModel, make_learner: Make, make_rows: Make) -> None:
    """SGD without momentum: the weights move by rate x clipped gradient, whose norm is max_grad_norm."""
    settings = {"name": "sgd", "momentum": 0.0, "learning_rate": 0.5, "warmup_fraction": 0.0, "max_grad_norm": 1e-3}
    learner = make_learner(tiny_llama, optimizer=settings)
    before = torch.cat([p.detach().flatten() for p in tiny_llama.parameters()])
    learner.forward_backward(TrainBatch(tuple(make_rows())), POLICY)
    metrics = learner.step(1)
    after = torch.cat([p.detach().flatten() for p in tiny_llama.parameters()])
    assert float((after - before).norm()) == pytest.approx(0.5e-3, rel=1e-2)
    assert metrics["optim/clipped"] == 1
    assert metrics["optim/grad_norm"] > 1e-3


# -- critic and warm start -------------------------------------------------------------------------


def test_critic_learns_a_toy(tiny_llama: PreTrainedModel, make_learner: Make, make_rows: Make) -> None:
    """Returns are +1 after an even first token and -1 after an odd one: explained variance rises from 0."""
    critic = {"optimizer": {"learning_rate": 3e-3, "warmup_fraction": 0.0}}
    learner = make_learner(tiny_llama, algorithm={"name": "ppo"}, critic=critic)
    learner.begin_rl()
    rows = [
        replace(row, returns=np.full(len(row.token_ids), 1.0 - 2 * (row.prompt_ids[0] % 2), dtype=np.float32))
        for row in make_rows(16)
    ]
    assert all((values == 0).all() for values in learner.score(rows, "critic"))
    before = tiny_llama.lm_head.weight.detach().clone()
    explained = []
    for seen in range(30):
        metrics = learner.forward_backward(TrainBatch(tuple(rows)), Objective("value", value_clip=0.0))
        explained.append(metrics["critic/explained_variance"])
        metrics |= learner.step(seen + 1)
    assert explained[0] == pytest.approx(0, abs=1e-6)
    assert explained[-1] > 0.8
    assert torch.equal(before, tiny_llama.lm_head.weight), "a critic-only update moved the policy"
    assert metrics["critic/learning_rate"] == pytest.approx(3e-3)
    assert "optim/grad_norm" not in metrics


def test_policy_and_critic_step_together(tiny_llama: PreTrainedModel, make_learner: Make, make_rows: Make) -> None:
    learner = make_learner(tiny_llama, algorithm={"name": "ppo"})
    rows = tuple(make_rows())
    metrics = learner.forward_backward(TrainBatch(rows), replace(POLICY, value_clip=0.2))
    metrics |= learner.step(1)
    assert {"policy/loss", "critic/loss", "optim/grad_norm", "critic/grad_norm"} <= metrics.keys()
    broken = replace(rows[0], returns=rows[0].returns * np.float32("inf"))
    learner.forward_backward(TrainBatch((broken, *rows[1:])), replace(POLICY, value_clip=0.2))
    before = tiny_llama.lm_head.weight.detach().clone()
    assert learner.step(2)["optim/skipped"] == 1
    assert torch.equal(before, tiny_llama.lm_head.weight)


def test_warm_start_uses_its_own_rate_and_lowers_the_loss(
    tiny_llama: PreTrainedModel, make_learner: Make, make_rows: Make
) -> None:
    learner = make_learner(tiny_llama, warm_start={"updates": 20, "learning_rate": 3e-3})
    losses = []
    for seen in range(20):
        losses.append(learner.forward_backward(TrainBatch(tuple(make_rows())), Objective("sft"))["optim/loss"])
        assert learner.step(seen + 1)["optim/learning_rate"] == 3e-3
    assert losses[-1] < losses[0] / 2
    learner.begin_rl()
    assert learner._optimizers["policy"]._optimizer.state == {}


def test_every_metric_key_is_described(tiny_llama: PreTrainedModel, make_learner: Make, make_rows: Make) -> None:
    from stoker.record.metrics import undescribed

    learner = make_learner(tiny_llama, algorithm={"name": "ppo"}, kl={"coefficient": 0.1})
    learner.begin_rl()
    rows = make_rows()
    rows = [replace(r, reference_logprobs=q) for r, q in zip(rows, learner.score(rows, "reference"), strict=True)]
    objective = replace(POLICY, kl_coefficient=0.1, value_clip=0.2, entropy_coefficient=0.01)
    metrics = learner.forward_backward(TrainBatch(tuple(rows)), objective) | learner.step(1)
    assert undescribed(metrics) == []
    assert all(math.isfinite(value) for value in metrics.values())


def test_peer_fault_07_no_temperature_in_trainer_logprobs(
    tiny_llama: PreTrainedModel, tiny_tokenizer: Any, make_learner: Make
) -> None:
    """Sampled at T = 0.6 and top-p = 0.9, the on-policy ratio is 1 to 1e-5 in fp32."""
    from stoker.engine.local.sampler import LocalSampler
    from stoker.rl.types import Prompt, Request, SamplingParams

    with torch.no_grad():  # at its own scale fp32 rounds this model's log-probs by 3e-5 (transformers against fp64)
        tiny_llama.lm_head.weight.mul_(0.25)
    sampler = LocalSampler(tiny_llama, tiny_tokenizer, concurrent_samples=8)
    params = SamplingParams(temperature=0.6, top_p=0.9, max_new_tokens=12)
    prompts = [Prompt(f"s:{i}", tuple(range(i + 1, 2 * i + 3)), "", None) for i in range(3)]
    sampler.submit([Request(prompt, index, params, seed=0) for prompt in prompts for index in range(4)])
    samples = list(sampler.collect())
    assert any(sample.kept is not None for sample in samples)
    learner = make_learner(tiny_llama)
    rows = [row_of(sample) for sample in samples]
    for row, scored in zip(rows, learner.score(rows, "policy"), strict=True):
        np.testing.assert_allclose(np.exp(scored - row.sampler_logprobs), 1, atol=1e-5)
    metrics = learner.forward_backward(TrainBatch(tuple(rows)), POLICY)
    assert metrics["policy/ratio_max"] == pytest.approx(1, abs=1e-6)
    assert metrics["policy/mismatch_max"] < 1e-5


def row_of(sample: Sample) -> TrainRow:
    length = len(sample.token_ids)
    return TrainRow(
        sample.id,
        sample.prompt.token_ids,
        sample.token_ids,
        mask=np.ones(length, dtype=np.bool_),
        weights=np.ones(length, dtype=np.float32),
        advantages=np.ones(length, dtype=np.float32),
        sampler_logprobs=sample.logprobs,
        temperature=sample.params.temperature,
        kept=sample.kept,
    )


def test_notes_say_what_was_detected(tiny_llama: PreTrainedModel, make_learner: Make) -> None:
    learner: LocalLearner = make_learner(tiny_llama)
    assert learner.notes == []
