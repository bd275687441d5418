"""Every loss through the learner: equal to TRL's own, and the same however the batch is cut, laid out or ordered."""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from stoker.config.algorithm import RECIPES, Algorithm
from stoker.rl.losses import SURROGATES
from stoker.rl.types import Objective, TrainBatch, TrainRow
from stoker.rl.updates import weigh

Make = Callable[..., Any]
LONGEST = 16
"""max_new_tokens of the rows."""


FP32_ROUNDING = 2e-5
"""Relative distance of two gradients that differ in the order of additions alone; a lost factor or row is far more."""


def drifted(rows: list[TrainRow]) -> list[TrainRow]:
    """Groups of three on a prompt of their own, one advantage a sample, by a policy that has moved since: ratios of
    about 0.3 to 3; a masked token inside, and a sample that left."""
    random = np.random.default_rng(5)
    found = []
    for index, row in enumerate(rows):
        mask = np.ones(len(row.mask), dtype=np.bool_)
        mask[1:2] = index != 4
        found.append(
            replace(
                row,
                sample_id=f"s:{index // 3}/{index % 3}",
                prompt_ids=tuple(range(1, 20 + index // 3)),
                mask=mask & (index != 5),
                advantages=np.full(len(mask), random.normal(), dtype=np.float32),
            )
        )
    return found


def aged(learner: Any, rows: list[TrainRow]) -> list[TrainRow]:
    """The rows with old and reference log-probs some way from the learner's own."""
    random = np.random.default_rng(6)
    return [
        replace(
            row,
            old_logprobs=(now + random.normal(0, 0.5, len(now))).astype(np.float32),
            reference_logprobs=(now + random.normal(0, 0.5, len(now))).astype(np.float32),
        )
        for row, now in zip(rows, learner.score(rows, "policy"), strict=True)
    ]


def distance(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


# --- TRL ----------------------------------------------------------------------------------------------

LOSSES: dict[str, tuple[Objective, Any, dict[str, Any]]] = {
    # our numbers, our weighting, TRL's numbers (its epsilon_high of cispo is the bound itself)
    "grpo": (Objective("policy"), "sample", {}),
    "bnpo": (Objective("policy"), "token", {}),
    "dr_grpo": (Objective("policy"), "fixed", {}),
    "dapo": (Objective("policy", clip_high=0.28), "token", {"epsilon_high": 0.28}),
    "cispo": (Objective("policy", surrogate="cispo", clip_low=1.0, clip_high=1.0), "token", {"epsilon_high": 2.0}),
    "sapo": (Objective("policy", surrogate="sapo"), "sample", {}),
    "grpo, dual clip": (Objective("policy", dual_clip=1.5), "sample", {"delta": 1.5}),
    "grpo by sequence": (
        Objective("policy", ratio="sequence", clip_low=0.05, clip_high=0.1), "sample",
        {"epsilon_low": 0.05, "epsilon_high": 0.1, "importance_sampling_level": "sequence"},
    ),
}  # fmt: skip


def trl_loss(model: PreTrainedModel, rows: list[TrainRow], loss_type: str, beta: float, **numbers: Any) -> Tensor:
    """TRL's `_compute_loss` on the rows in one padded batch; the log-probs are the model's own, row by row."""
    trl = pytest.importorskip("trl")
    width = max(len(row.mask) for row in rows)

    def padded(values: list[Any], dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.stack([torch.tensor(np.pad(one, (0, width - len(one)))).to(dtype) for one in values])

    def logprobs(*_: Any, **__: Any) -> tuple[Tensor, Tensor, None]:
        lines = []
        for row in rows:
            ids = torch.tensor([[*row.prompt_ids, *row.token_ids.tolist()]])
            logits = model(input_ids=ids).logits[0, len(row.prompt_ids) - 1 : -1].log_softmax(-1)
            one = logits.gather(1, torch.from_numpy(row.token_ids).long()[:, None])[:, 0]
            lines.append(torch.nn.functional.pad(one, (0, width - len(one))))
        return torch.stack(lines), torch.zeros(len(rows), width), None

    mask = padded([row.mask for row in rows], torch.int64)
    settings = {"epsilon_low": 0.2, "epsilon_high": 0.2, "importance_sampling_level": "token", "delta": None} | numbers
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=logprobs, loss_type=loss_type, beta=beta, aux_loss_enabled=False,
        top_entropy_quantile=1.0, off_policy_mask_threshold=None, use_vllm=False, current_gradient_accumulation_steps=1,
        max_completion_length=LONGEST, _entropy_bonus_enabled=False, model=SimpleNamespace(training=True),
        _metrics=defaultdict(lambda: defaultdict(list)),
        accelerator=SimpleNamespace(num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x),
        args=SimpleNamespace(delta=settings.pop("delta"), sapo_temperature_pos=1.0, sapo_temperature_neg=1.05,
                             use_bias_correction_kl=False, steps_per_generation=1),
        **settings,
    )  # fmt: skip
    ids = torch.zeros(len(rows), width, dtype=torch.int64)
    inputs = {
        "prompt_ids": ids, "prompt_mask": ids, "completion_ids": ids, "completion_mask": mask,
        "advantages": torch.tensor([float(row.advantages[0]) for row in rows]),
        "num_items_in_batch": mask.sum(),
    }  # fmt: skip
    if rows[0].old_logprobs is not None:
        inputs["old_per_token_logps"] = padded([row.old_logprobs for row in rows])
    if beta:
        inputs["ref_per_token_logps"] = padded([row.reference_logprobs for row in rows])
    loss: Tensor = trl.GRPOTrainer._compute_loss(trainer, model, inputs)
    return loss


@pytest.mark.parametrize("beta", [0.0, 0.1])
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.filterwarnings("ignore")
def test_loss_and_gradient_equal_trls(
    tiny_llama: PreTrainedModel, make_learner: Make, make_rows: Make, gradients: Make, name: str, beta: float
) -> None:
    """Off-policy; with a leash on-policy, where TRL's k3 needs no importance weight and ours is 1."""
    objective, weighting, numbers = LOSSES[name]
    learner = make_learner(tiny_llama, update={"tokens_per_microbatch": 60})
    rows = aged(learner, [row for row in drifted(make_rows(9)) if row.mask.any()])
    if beta:
        rows = [replace(row, old_logprobs=None) for row in rows]
        objective = replace(objective, kl_coefficient=beta, kl_estimator="k3")
    expected = trl_loss(tiny_llama, rows, name.split(",")[0].split(" ")[0], beta, **numbers)
    parameters = list(tiny_llama.parameters())
    flat = torch.cat([one.flatten() for one in torch.autograd.grad(expected, parameters)])
    metrics = learner.forward_backward(TrainBatch(tuple(weigh(rows, weighting, LONGEST))), objective)
    assert metrics["batch/microbatches"] > 1
    assert metrics["optim/loss"] == pytest.approx(expected.item(), rel=1e-5, abs=1e-6)
    assert distance(gradients(learner), flat) <= 1e-5
    if not beta and name != "sapo":
        assert metrics["policy/clipped"] > 0.1  # or the test would say little


# --- invariance ---------------------------------------------------------------------------------------

WEIGHTINGS = ("token", "sample", "prompt", "fixed")
OBJECTIVES: list[tuple[str, str, Any]] = [
    *((surrogate, "token", WEIGHTINGS[place]) for place, surrogate in enumerate(SURROGATES)),
    *((surrogate, "sequence", WEIGHTINGS[place - 1]) for place, surrogate in enumerate(SURROGATES)),
    *(("clip", "sequence", weighting) for weighting in WEIGHTINGS[:-1]),
]
LEASHED = {"kl_coefficient": 0.1, "kl_level": "sequence", "entropy_coefficient": 0.05}


@pytest.mark.parametrize(("surrogate", "ratio", "weighting"), OBJECTIVES)
@pytest.mark.parametrize("extra", [{}, LEASHED], ids=["bare", "leashed"])
def test_every_loss_is_the_same_however_the_batch_is_cut_padded_shared_and_ordered(
    tiny_llama: PreTrainedModel, make_learner: Make, make_rows: Make, gradients: Make,
    surrogate: str, ratio: str, weighting: Any, extra: dict[str, Any],
) -> None:  # fmt: skip
    objective = Objective("policy", surrogate=surrogate, ratio=ratio, dual_clip=1.5, **extra)
    rows = aged(make_learner(tiny_llama), drifted(make_rows(9)))

    def measured(rows: list[TrainRow], budget: int, width: int) -> tuple[dict[str, float], Tensor]:
        learner = make_learner(tiny_llama, update={"tokens_per_microbatch": budget})
        learner._policy.sharing_width = width
        metrics = learner.forward_backward(TrainBatch(tuple(weigh(rows, weighting, LONGEST))), objective)
        found = gradients(learner)
        learner._optimizers["policy"].zero()  # learners share the model
        return metrics, found

    expected_metrics, expected = measured(rows, 4096, 0)
    assert expected.norm() > 0
    order = np.random.default_rng(0).permutation(len(rows))
    nothing = np.full(60, np.nan, dtype=np.float32)
    unused = replace(
        rows[5], sample_id="t:0/0", token_ids=np.zeros(60, dtype=np.int32), mask=np.zeros(60, dtype=np.bool_),
        advantages=nothing, old_logprobs=nothing, reference_logprobs=nothing, sampler_logprobs=nothing,
    )  # fmt: skip
    for changed, budget, width in (
        (rows, 1, 0),  # each row alone, without padding
        (rows, 45, 0),
        (rows, 4096, 32),  # prompts computed once
        (rows, 60, 32),
        ([rows[index] for index in order], 50, 32),
        ([*rows, unused], 4096, 32),  # a sample that left changes no denominator
    ):
        metrics, found = measured(changed, budget, width)
        assert distance(found, expected) <= FP32_ROUNDING
        for key in ("optim/loss", "policy/loss", "policy/ratio_mean", "policy/ratio_max", "policy/entropy"):
            assert metrics[key] == pytest.approx(expected_metrics[key], rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("name", [name for name in RECIPES if name != "ppo"])
def test_on_policy_every_recipe_has_the_policy_gradient(
    tiny_llama: PreTrainedModel, make_learner: Make, make_rows: Make, gradients: Make, name: str
) -> None:
    """At ratio 1 each surrogate's gradient is that of -A log p (one sequence ratio: of its mean): no factor is lost."""
    algorithm = Algorithm(name=name)  # type: ignore[arg-type]
    learner = make_learner(tiny_llama)
    rows = weigh([row for row in drifted(make_rows(9)) if row.mask.all()], algorithm.loss_weighting, LONGEST)
    total = torch.zeros(())
    for row in rows:
        ids = torch.tensor([[*row.prompt_ids, *row.token_ids.tolist()]])
        logits = tiny_llama(input_ids=ids).logits[0, len(row.prompt_ids) - 1 : -1].log_softmax(-1)
        one = logits.gather(1, torch.from_numpy(row.token_ids).long()[:, None])[:, 0]
        total = total - float(row.advantages[0]) * (torch.from_numpy(row.weights) * one).sum()
    flat = torch.cat([one.flatten() for one in torch.autograd.grad(total, list(tiny_llama.parameters()))])
    objective = Objective(
        "policy", algorithm.loss, algorithm.ratio, algorithm.clip_low, algorithm.clip_high, algorithm.dual_clip,
        algorithm.gate_positive, algorithm.gate_negative,
    )  # fmt: skip
    learner.forward_backward(TrainBatch(tuple(rows)), objective)
    assert distance(gradients(learner), flat) <= FP32_ROUNDING
