"""The learner of one process: adds up gradients in micro-batches, takes optimizer steps, scores rows.

It shares the compute weights with the sampler: a step changes them in place.
"""

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from stoker.config import schema
from stoker.engine.local import saving
from stoker.engine.local.budget import TokenBudget
from stoker.engine.local.critic import follows_policy, start_critic
from stoker.engine.local.forward import ScoringModel, checkpoint_activations
from stoker.engine.local.layout import Microbatch, collate
from stoker.engine.local.load import cast_weights, load_other
from stoker.engine.local.optim import MasterOptimizer, NormGuard, learning_rate
from stoker.engine.local.tally import Tally
from stoker.errors import ModelError, RunError
from stoker.record.memory import peak_resident_bytes
from stoker.rl.batches import skippable
from stoker.rl.losses import Terms, evaluate
from stoker.rl.ports import Metrics, Role
from stoker.rl.types import Floats, Objective, TrainBatch, TrainRow

__all__ = ["LocalLearner"]


class LocalLearner:
    """Implements `rl.ports.Learner` (which see) for a model in this process.

    After a warm start, or at once without one, call `begin_rl`: it fixes what "the initial policy" is.
    """

    def __init__(self, config: schema.RunConfig, model: PreTrainedModel, tokenizer: Any, *, total_samples: int) -> None:
        self._config = config
        self._model = model
        self._tokenizer = tokenizer
        self._total_samples = total_samples
        self._budget = TokenBudget(config.update.tokens_per_microbatch, model.device)
        self._policy = ScoringModel(model, config.update.logits_per_chunk)
        self._reference: ScoringModel | None = None
        if config.kl.coefficient and config.reference.path:
            self._set_reference(load_other(config, config.reference))
        self._critic = start_critic(config, model) if config.algorithm.name == "ppo" else None
        if config.update.activation_checkpointing:
            for module in [model] if self._critic is None else [model, self._critic.trunk]:
                checkpoint_activations(module)
        self._optimizers: dict[Role, MasterOptimizer] = {"policy": MasterOptimizer(model, config.optimizer)}
        if self._critic is not None:
            self._optimizers["critic"] = MasterOptimizer(self._critic, config.critic.optimizer)
        self._guards = {role: NormGuard(self._settings(role).skip_grad_norm_ratio) for role in self._optimizers}
        self._pending: dict[Role, str] = {}  # roles with a gradient, and the loss it came from
        self._pending_samples: list[str] = []
        self._losses_finite = True
        self.refusal = ""
        """Why the last step was skipped; empty where it wasn't."""
        self.refused_samples: tuple[str, ...] = ()
        """Ids of the samples behind the skipped update."""

    @property
    def notes(self) -> list[str]:
        """What was detected or adapted, a sentence each, for the user."""
        return [*self._policy.notes, *self._budget.notes]

    # -- the two verbs ---------------------------------------------------------------------------

    def forward_backward(self, batch: TrainBatch, objective: Objective) -> Metrics:
        metrics: Metrics = {}
        if objective.loss != "value":
            metrics |= self._accumulate("policy", batch, objective)
        if self._critic is not None and objective.loss != "sft":
            metrics |= self._accumulate("critic", batch, replace(objective, loss="value"))
        self._pending_samples += [row.sample_id for row in batch.rows]
        return metrics | {"batch/tokens_per_microbatch": float(self._budget.tokens)}

    def step(self, samples_seen: int) -> Metrics:
        norms = {role: self._optimizers[role].norm() for role in self._pending}
        self.refusal = self._reason_to_refuse(norms)
        self.refused_samples = tuple(self._pending_samples) if self.refusal else ()
        metrics: Metrics = {"optim/skipped": float(bool(self.refusal))}
        for role, norm in norms.items():
            group, settings = "optim" if role == "policy" else role, self._settings(role)
            rate = learning_rate(settings, samples_seen, self._total_samples)
            if self._pending[role] == "sft":
                rate = self._config.warm_start.learning_rate
            metrics |= {f"{group}/grad_norm": norm, f"{group}/learning_rate": rate}
            if role == "policy":
                metrics["optim/clipped"] = float(0 < settings.max_grad_norm < norm)
            if self.refusal:
                self._optimizers[role].zero()
            else:
                self._optimizers[role].step(rate, norm)
        self._pending, self._pending_samples, self._losses_finite = {}, [], True
        return metrics

    @torch.no_grad()
    def score(self, rows: Sequence[TrainRow], role: Role) -> list[Floats]:
        model = self._critic if role == "critic" else self._reference if role == "reference" else self._policy
        if model is None:
            fix = (
                "call begin_rl first, with kl.coefficient > 0" if role == "reference" else "set algorithm.name = 'ppo'"
            )
            raise RunError(f"there is no {role} to score with: {fix}")

        def attempt() -> list[Floats]:
            result: dict[int, Floats] = {}
            for lines in self._budget.microbatches(rows, model.sharing_width):
                micro = collate(rows, lines, self._model.device, only_counted=False)
                scores = model(micro)
                values = micro.spread(scores if isinstance(scores, Tensor) else scores.logprobs).float().cpu().numpy()
                order = [index for line in lines for index in line.rows]
                for index, padded in zip(order, values, strict=True):
                    result[index] = padded[: len(rows[index].token_ids)].copy()
            return [result[index] for index in range(len(rows))]

        return self._budget.retry(attempt, undo=lambda: None)

    # -- gradients -------------------------------------------------------------------------------

    def _accumulate(self, role: Role, batch: TrainBatch, objective: Objective) -> Metrics:
        optimizer = self._optimizers[role]
        rows = [row for row in batch.rows if not skippable(row, objective)]
        optimizer.grad_scale = self._grad_scale(rows)
        # Gradients of earlier batches must survive a lack of memory in this one.
        earlier = [None if gradient is None else gradient.clone() for gradient in optimizer.gradients()]

        def undo() -> None:
            optimizer.set_gradients([None if gradient is None else gradient.clone() for gradient in earlier])

        module = self._model if role == "policy" else self._critic
        assert module is not None
        module.train(self._config.update.activation_checkpointing)  # nothing else hangs on it: dropout is 0
        try:
            tally = self._budget.retry(lambda: self._add_gradients(role, rows, objective), undo)
        finally:
            module.eval()
        self._pending[role] = objective.loss
        self._losses_finite &= math.isfinite(tally.loss)
        return tally.metrics()

    def _add_gradients(self, role: Role, rows: Sequence[TrainRow], objective: Objective) -> Tally:
        tally = Tally(objective)
        for lines in self._budget.microbatches(rows, self._sharing_width(role)):
            micro = collate(rows, lines, self._model.device, only_counted=True)
            terms, weights = self._terms(role, micro)
            loss, metrics = evaluate(terms, objective)
            ((weights * loss).sum() * self._optimizers[role].grad_scale).backward()
            tally.add(len(micro.targets), weights, loss, metrics)
            tally.add_microbatch(micro.useful_tokens, micro.token_ids.numel())
            if terms.values is not None and terms.returns is not None:
                tally.add_values(terms.mask, terms.values, terms.returns)
        return tally

    def _terms(self, role: Role, micro: Microbatch) -> tuple[Terms, Tensor]:
        """What the losses see, and the loss weights, all (B, T)."""
        mask, weights = micro.column("mask"), micro.column("weights")
        assert mask is not None
        assert weights is not None
        if role == "critic" and self._critic is not None:
            values = micro.spread(self._critic(micro))
            old, returns = micro.column("old_values"), micro.column("returns")
            return Terms(mask, values=values, old_values=old, returns=returns), weights
        scores = self._policy(micro)
        given = ("old_logprobs", "sampler_logprobs", "reference_logprobs", "advantages")
        known = {name: micro.column(name) for name in given}
        return Terms(mask, micro.spread(scores.logprobs), micro.spread(scores.entropy), **known), weights

    def _sharing_width(self, role: Role) -> int:
        return (
            self._critic.sharing_width if role == "critic" and self._critic is not None else self._policy.sharing_width
        )

    def _grad_scale(self, rows: Sequence[TrainRow]) -> float:
        """float16 can't hold the gradient of a loss over thousands of tokens: lift a token's weight to about 1."""
        if self._model.dtype != torch.float16:
            return 1.0
        largest = max((float(np.abs(row.weights).max(initial=0)) for row in rows), default=0.0)
        return 2.0 ** -round(math.log2(largest)) if largest else 1.0

    def _reason_to_refuse(self, norms: Mapping[Role, float]) -> str:
        """Policy and critic step together or not at all."""
        if not self._losses_finite:
            return "the loss isn't finite"
        reasons = [
            f"the {role}'s gradient norm {reason}" for role in norms if (reason := self._guards[role](norms[role]))
        ]
        return "; ".join(reasons)

    def _settings(self, role: Role) -> schema.Optimizer:
        return self._config.critic.optimizer if role == "critic" else self._config.optimizer

    # -- reference and critic --------------------------------------------------------------------

    def begin_rl(self) -> None:
        """Call once when RL begins, after any warm start; not on resume.

        The policy as it is now becomes the reference (unless reference.path names one) and the start of
        the critic (unless critic.path or start_from does); optimizers start afresh.
        """
        self.freeze_reference()
        if self._critic is not None and follows_policy(self._config):
            self._critic.restart_from(self._model)
        for optimizer in self._optimizers.values():
            optimizer.restart()
        for guard in self._guards.values():
            guard.past.clear()

    def freeze_reference(self) -> None:
        """Copy the present policy as the reference; nothing to do without a leash or with a reference.path."""
        if self._config.kl.coefficient and not self._config.reference.path:
            dtype = self._config.reference.dtype
            self._set_reference(
                cast_weights(copy.deepcopy(self._model), getattr(torch, dtype) if dtype else self._model.dtype)
            )

    def save_reference(self, folder: Path) -> None:
        """Once a run: the initial policy can't be told from later checkpoints. No-op where it needs no saving."""
        if self._reference is not None and not self._config.reference.path:
            saving.save_tensors(saving.tensors_of(self._reference.model), folder / "reference.safetensors")

    def load_reference(self, folder: Path) -> None:
        """On resume, instead of `begin_rl`."""
        self.freeze_reference()
        if self._reference is not None and not self._config.reference.path:
            path = folder / "reference.safetensors"
            saving.copy_tensors(saving.load_tensors(path), self._reference.model, path)

    def _set_reference(self, model: PreTrainedModel) -> None:
        if model.config.get_text_config().vocab_size != self._model.config.get_text_config().vocab_size:
            raise ModelError(
                "the reference has another vocabulary than the policy: set reference.path to a model of its family"
            )
        model.requires_grad_(False).eval()
        self._reference = ScoringModel(model, self._config.update.logits_per_chunk)

    # -- saving ----------------------------------------------------------------------------------

    def save(self, folder: Path) -> None:
        saving.save_policy(self._model, self._tokenizer, folder / "policy")
        for role, optimizer in self._optimizers.items():
            saving.save_tensors(optimizer.tensors(), folder / f"{role}_optimizer.safetensors")
        if self._critic is not None:
            saving.save_tensors(saving.tensors_of(self._critic), folder / "critic.safetensors")
        saving.save_rng(folder / "rng.safetensors")
        norms = {role: list(guard.past) for role, guard in self._guards.items()}
        saving.save_json(
            {"schema_version": 1, "dtype": str(self._model.dtype), "gradient_norms": norms}, folder / "learner.json"
        )

    def load(self, folder: Path) -> None:
        saving.load_policy(self._model, folder / "policy")
        if self._critic is not None:
            path = folder / "critic.safetensors"
            saving.copy_tensors(saving.load_tensors(path), self._critic, path)
        for role, optimizer in self._optimizers.items():
            optimizer.load_tensors(saving.load_tensors(folder / f"{role}_optimizer.safetensors"))
        saving.load_rng(folder / "rng.safetensors")
        norms = saving.load_json(folder / "learner.json")["gradient_norms"]
        for role, guard in self._guards.items():
            guard.past.clear()
            guard.past.extend(norms[role])

    def checkpoint_bytes(self) -> int:
        """Weights, fp32 masters and two moments of each model, at most."""
        modules = [self._model] if self._critic is None else [self._model, self._critic]
        return sum(p.numel() * (p.element_size() + 12) for module in modules for p in module.parameters())

    def memory(self) -> Metrics:
        """Peak of the device since the last call (on a CPU: of the process, ever), in bytes."""
        if self._model.device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(self._model.device)
            torch.cuda.reset_peak_memory_stats(self._model.device)
        else:
            peak = peak_resident_bytes()
        return {"memory/peak": float(peak)}

    def state(self) -> dict[str, Any]:
        return {"tokens_per_microbatch": self._budget.tokens}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._budget.tokens = int(state["tokens_per_microbatch"])
