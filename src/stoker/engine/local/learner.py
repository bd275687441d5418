"""The learner of one process: adds up gradients in micro-batches, takes optimizer steps, scores rows.

It shares the compute weights with the sampler: a step changes them in place.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from stoker.batch.controllers.prompts import growth_factor
from stoker.config import schema
from stoker.engine.local import saving
from stoker.engine.local.activations import ActivationLimit
from stoker.engine.local.budget import TokenBudget, peak_bytes
from stoker.engine.local.critic import Critic, follows_policy, start_critic
from stoker.engine.local.forward import ScoringModel
from stoker.engine.local.layout import Microbatch, collate
from stoker.engine.local.looks import measured
from stoker.engine.local.optim import MasterOptimizer, NormGuard, learning_rate, loss_scale
from stoker.engine.local.reference import Reference, initial_policy, named_reference
from stoker.engine.local.tally import Tally
from stoker.engine.local.terms import policy_terms, value_terms
from stoker.errors import RunError
from stoker.rl.losses import Terms, evaluate
from stoker.rl.ports import Metrics, Role
from stoker.rl.types import Floats, Objective, TrainBatch, TrainRow
from stoker.rl.updates import skippable

if TYPE_CHECKING:
    from stoker.engine.local.adapters import Adapters

__all__ = ["LocalLearner"]


class LocalLearner:
    """Implements `rl.ports.Learner` (which see) for a model in this process.

    After a warm start, or at once without one, call `begin_rl`: it fixes what "the initial policy" is.
    """

    def __init__(
        self,
        config: schema.RunConfig,
        model: PreTrainedModel,
        tokenizer: Any,
        *,
        total_samples: int,
        adapters: "Adapters | None" = None,
        exact: Mapping[str, Tensor] | None = None,
        measuring: bool = False,
    ) -> None:
        """`adapters`: those in the model that are trained; None: all its weights are. `exact`: see MasterOptimizer.
        `measuring`: a lack of memory surfaces, where a run would go on with smaller micro-batches.
        """
        self._config, self._model = config, model
        self._adapters, self._tokenizer, self._total_samples = adapters, tokenizer, total_samples
        self._budget = TokenBudget(config.update.microbatch_tokens, model.device, shrinks=not measuring)
        compiled, gib = config.update.compiled, config.update.activation_gib
        self._policy = ScoringModel(model, config.update.logits_per_chunk, compiled=compiled)
        self._reference: Reference | None = named_reference(config, model)
        self._critic = start_critic(config, model) if config.algorithm.needs_critic else None
        self._limits: dict[Role, ActivationLimit] = {"policy": ActivationLimit(model, self._policy, gib)}
        optimizer = MasterOptimizer(model, config.optimizer, exact, compiled=compiled)
        self._optimizers: dict[Role, MasterOptimizer] = {"policy": optimizer}
        if self._critic is not None:
            self._limits["critic"] = ActivationLimit(self._critic.trunk, self._critic, gib)
            self._optimizers["critic"] = MasterOptimizer(self._critic, config.critic.optimizer, compiled=compiled)
        self._guards = {role: NormGuard(self._settings(role).skip_grad_norm_ratio) for role in self._optimizers}
        self._pending: dict[Role, str] = {}  # roles with a gradient, and the loss it came from
        self._pending_samples: list[str] = []
        self._losses_finite = True
        self.refusal = ""
        """Why the last step was skipped; empty where it wasn't."""
        self.refused_samples: tuple[str, ...] = ()  # behind the skipped update

    @property
    def notes(self) -> list[str]:
        """What was detected or adapted, a sentence each, for the user."""
        adapted = [] if self._adapters is None else self._adapters.notes
        longest = self._config.task.max_prompt_tokens + self._config.sampling.max_new_tokens
        tokens, share = self._budget.tokens, self._budget.share
        limited = [note for limit in self._limits.values() for note in limit.notes(tokens, longest, share)]
        return [*adapted, *self._policy.notes, *limited, *self._budget.notes]

    @property
    def arithmetic(self) -> str:
        """What computes attention's backward pass of an update, for a manifest."""
        return self._policy.arithmetic

    def cut_by(self, tokens: int) -> None:
        """From now on a micro-batch holds at most so many padded tokens."""
        self._budget.configure(tokens)

    # -- the two verbs ---------------------------------------------------------------------------

    def forward_backward(self, batch: TrainBatch, objective: Objective) -> Metrics:
        metrics: Metrics = {}
        if objective.loss != "value":
            metrics |= self._accumulate("policy", batch, objective)
        if self._critic is not None and objective.loss != "sft":
            metrics |= self._accumulate("critic", batch, replace(objective, loss="value"))
        self._pending_samples += [row.sample_id for row in batch.rows]
        return metrics | {"batch/tokens_per_microbatch": float(self._budget.tokens)}

    def step(self, samples_seen: int, growth: float = 1.0) -> Metrics:
        norms = {role: self._optimizers[role].norm() for role in self._pending}
        self.refusal = self._reason_to_refuse(norms)
        self.refused_samples = tuple(self._pending_samples) if self.refusal else ()
        metrics: Metrics = {"optim/skipped": float(bool(self.refusal))}
        for role, norm in norms.items():
            group, settings = "optim" if role == "policy" else role, self._settings(role)
            rate = learning_rate(settings, samples_seen, self._total_samples, growth_factor(self._config, role, growth))
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
        if role == "reference":
            if self._reference is None:
                raise RunError("there is no reference to score with: call begin_rl first, with kl.coefficient > 0")
            with self._reference.scoring() as model:
                return self._score(rows, model)
        if role == "critic":
            if self._critic is None:
                raise RunError("there is no critic to score with: set algorithm.name = 'ppo'")
            return self._score(rows, self._critic)
        return self._score(rows, self._policy)

    def _score(self, rows: Sequence[TrainRow], model: ScoringModel | Critic) -> list[Floats]:
        """Laid out, cut and headed as an update lays out, cuts and heads the same rows: equal weights, equal bits."""
        places = [place for place, row in enumerate(rows) if row.mask.any()]
        counted = [rows[place] for place in places]

        def attempt() -> list[Floats]:
            result = [np.zeros(len(row.token_ids), np.float32) for row in rows]
            for lines in self._budget.microbatches(counted, model.sharing_width):
                micro = collate(counted, lines, self._model.device)
                scores = model(micro)
                values = micro.spread(scores if isinstance(scores, Tensor) else scores.logprobs).float().cpu().numpy()
                order = [index for line in lines for index in line.rows]
                for index, padded in zip(order, values, strict=True):
                    result[places[index]] = padded[: len(counted[index].token_ids)].copy()
            return result

        return self._budget.retry(attempt, undo=lambda: None)

    # -- gradients -------------------------------------------------------------------------------

    def _accumulate(self, role: Role, batch: TrainBatch, objective: Objective) -> Metrics:
        optimizer = self._optimizers[role]
        optimizer.grad_scale = loss_scale(self._model.dtype, [row.weights for row in batch.rows])
        # Gradients of earlier batches must survive a lack of memory in this one.
        earlier = [None if gradient is None else gradient.clone() for gradient in optimizer.gradients()]

        def undo() -> None:
            optimizer.set_gradients([None if gradient is None else gradient.clone() for gradient in earlier])

        with self._limits[role].training():
            tally, looked = self._budget.retry(lambda: self._add_gradients(role, batch, objective), undo)
        self._pending[role] = objective.loss
        self._losses_finite &= math.isfinite(tally.loss)
        return tally.metrics() | looked

    def _add_gradients(self, role: Role, batch: TrainBatch, objective: Objective) -> tuple[Tally, Metrics]:
        tally = Tally(objective)

        def add(rows: Sequence[TrainRow]) -> None:
            self._add_rows(role, [row for row in rows if not skippable(row, objective)], objective, tally)

        if role == "policy" and batch.measure is not None:
            return tally, measured(self._optimizers[role], batch, batch.measure, self._config, add)
        add(batch.rows)
        return tally, {}

    def _add_rows(self, role: Role, rows: Sequence[TrainRow], objective: Objective, tally: Tally) -> None:
        scorer = self._critic if role == "critic" and self._critic is not None else self._policy
        for lines in self._budget.microbatches(rows, scorer.sharing_width):
            micro = collate(rows, lines, self._model.device)
            self._limits[role].apply(micro, self._budget.share)
            terms, weights = self._terms(role, micro), micro.column("weights")
            loss, metrics = evaluate(terms, objective)
            ((weights * loss).sum() * self._optimizers[role].grad_scale).backward()
            tally.add(len(micro.targets), weights, loss, metrics)
            tally.add_microbatch(micro.useful_tokens, micro.token_ids.numel())
            if terms.values is not None and terms.returns is not None:
                tally.add_values(terms.mask, terms.values, terms.returns)

    def _terms(self, role: Role, micro: Microbatch) -> Terms:
        if role == "critic" and self._critic is not None:
            return value_terms(micro, self._critic(micro))
        return policy_terms(micro, self._policy(micro))

    def _reason_to_refuse(self, norms: Mapping[Role, float]) -> str:
        """Policy and critic step together or not at all."""
        if not self._losses_finite:
            return "the loss isn't finite"
        return "; ".join(
            f"the {role}'s gradient norm {reason}" for role in norms if (reason := self._guards[role](norms[role]))
        )

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
        """Keep the present policy as the reference; nothing to do without a leash or with a reference.path."""
        if self._config.kl.coefficient and not self._config.reference.path:
            self._reference = initial_policy(self._config, self._model, self._policy, self._adapters)

    def save_reference(self, folder: Path) -> None:
        """Once a run: the initial policy can't be told from later checkpoints. No-op where it needs no saving."""
        if self._reference is not None and not self._config.reference.path:
            saving.save_tensors(self._reference.tensors(), folder / "reference.safetensors")

    def load_reference(self, folder: Path) -> None:
        """On resume, instead of `begin_rl`."""
        self.freeze_reference()
        if self._reference is not None and not self._config.reference.path:
            path = folder / "reference.safetensors"
            self._reference.restore(saving.load_tensors(path), path)

    # -- saving ----------------------------------------------------------------------------------

    def save(self, folder: Path) -> None:
        if self._adapters is None:
            saving.save_policy(self._model, self._tokenizer, folder / "policy")
        else:
            self._adapters.save(folder, self._tokenizer)
        for role, optimizer in self._optimizers.items():
            saving.save_tensors(optimizer.tensors(), folder / f"{role}_optimizer.safetensors")
        if self._critic is not None:
            saving.save_tensors(saving.tensors_of(self._critic), folder / "critic.safetensors")
        saving.save_rng(folder / "rng.safetensors")
        norms = {role: list(guard.past) for role, guard in self._guards.items()}
        facts = {"schema_version": 1, "dtype": str(self._model.dtype), "gradient_norms": norms}
        saving.save_json(facts, folder / "learner.json")

    def load(self, folder: Path) -> None:
        if self._adapters is None:
            saving.load_policy(self._model, folder / "policy")
        else:
            self._adapters.load(folder)
        if self._critic is not None:
            path = folder / "critic.safetensors"
            saving.copy_tensors(saving.load_tensors(path), saving.tensors_of(self._critic), path)
        for role, optimizer in self._optimizers.items():
            optimizer.load_tensors(saving.load_tensors(folder / f"{role}_optimizer.safetensors"))
        saving.load_rng(folder / "rng.safetensors")
        norms = saving.load_json(folder / "learner.json")["gradient_norms"]
        for role, guard in self._guards.items():
            guard.past.clear()
            guard.past.extend(norms[role])

    def checkpoint_bytes(self) -> int:
        """Weights, fp32 masters and two moments of what is trained, at most, and the whole policy."""
        parameters = [p for module in (self._model, self._critic) if module is not None for p in module.parameters()]
        trained = sum(p.numel() * (p.element_size() + 12) for p in parameters if p.requires_grad)
        return trained + (0 if self._adapters is None else self._adapters.policy_bytes())

    def memory(self) -> Metrics:
        """Peak of the device since the last call (on a CPU: of the process, ever), in bytes."""
        return {"memory/peak": float(peak_bytes(self._model.device))}

    def state(self) -> dict[str, Any]:
        return self._budget.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        self._budget.restore(state)
