"""From a run file to the engine of one process: the model, and the learner and sampler that share it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from stoker.batch import plan as batch_plan
from stoker.config.schema import Model, RunConfig
from stoker.engine.checkpoint import policy_folder
from stoker.engine.local.fused import prepare_update
from stoker.engine.local.learner import LocalLearner
from stoker.engine.local.load import adapters_to_train, count_parameters, exact_weights, load_model
from stoker.engine.local.sampler import LocalSampler

__all__ = ["LocalEngine", "assemble", "policy_source"]


@dataclass(frozen=True)
class LocalEngine:
    """What a run trains and samples with, and the plan that its size completes."""

    model: PreTrainedModel
    learner: LocalLearner
    sampler: LocalSampler
    plan: batch_plan.BatchPlan
    update_arithmetic: str
    """What computes an update, for a manifest."""


def policy_source(config: RunConfig) -> Model:
    """What the policy is loaded from: start_from where there is one, else model.path."""
    if not config.start_from:
        return config.model
    path = str(policy_folder(Path(config.start_from)))
    return config.model.model_copy(update={"path": path, "from_scratch": False})


def assemble(config: RunConfig, tokenizer: Any, *, measuring: bool = False) -> LocalEngine:
    """Load the policy, and the critic and reference that the run file names; nothing is sampled yet.

    `measuring`: for whoever looks for the limits of memory; answers end by length alone, and a lack of memory surfaces.
    Raises ModelError for models that can't be had.
    """
    source = policy_source(config)
    model = load_model(source, config.seed)
    parameters = count_parameters(model)
    adapters = adapters_to_train(model, config, source.path)
    norms_and_gates = prepare_update(model, compiled=config.update.compiled)
    plan = batch_plan.make(config, parameters, count_parameters(model, trained=True))
    exact = exact_weights(source, model, config.seed) if adapters is None else {}
    learner = LocalLearner(
        config,
        model,
        tokenizer,
        total_samples=plan.total_samples,
        adapters=adapters,
        exact=exact,
        measuring=measuring,
    )
    sampler = LocalSampler(
        model,
        tokenizer,
        concurrent_samples=config.sampling.concurrent_samples,
        compiled=config.sampling.compiled,
        measuring=measuring,
    )
    same = norms_and_gates == learner.arithmetic
    arithmetic = norms_and_gates if same else f"norms and gates {norms_and_gates}, attention {learner.arithmetic}"
    return LocalEngine(model, learner, sampler, plan, arithmetic)
