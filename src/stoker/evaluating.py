"""`stoker eval`: any model on a run file's held-out prompts."""

from pathlib import Path

from stoker.config.schema import RunConfig
from stoker.engine.checkpoint import policy_folder
from stoker.engine.local.load import load_model, load_tokenizer
from stoker.engine.local.sampler import LocalSampler
from stoker.errors import ConfigError
from stoker.rl import rewards, tasks
from stoker.rl.evaluate import evaluate

__all__ = ["evaluate_model", "table"]

Found = dict[str, dict[str, float]]


def evaluate_model(model: str, config: RunConfig, samples_per_prompt: int) -> Found:
    """Metrics by validation set: accuracy, reward, their standard errors, unparsed, wrong, truncated, pass@k.

    `model` may be a run folder, a checkpoint, a model folder, a Hugging Face name, or `embedded:tiny`.
    """
    path = str(policy_folder(Path(model))) if Path(model).is_dir() else model
    validation = config.validation.model_copy(update={"samples_per_prompt": samples_per_prompt})
    chosen = config.model.model_copy(update={"path": path, "from_scratch": False})
    config = config.model_copy(update={"model": chosen, "validation": validation})
    tokenizer = load_tokenizer(chosen)
    data = tasks.load(config, tokenizer)
    if not data.validation:
        raise ConfigError("the run file has no held-out prompts: set validation.holdout or [[validation.sets]]")
    network = load_model(chosen, config.seed)
    sampling = config.sampling
    sampler = LocalSampler(
        network, tokenizer, concurrent_samples=sampling.concurrent_samples, compiled=sampling.compiled
    )
    suite = rewards.build(config.rewards)
    try:
        metrics, _ = evaluate(sampler, suite, data.validation, config, suite.solved, step=0)
    finally:
        suite.close()
    found: Found = {name: {} for name in data.validation}
    for key, value in metrics.items():
        _, name, metric = key.split("/", 2)
        found[name][metric] = value
    return found


def table(found: Found, samples_per_prompt: int) -> str:
    """The metrics as aligned text, a block a set."""
    lines = []
    drawn = "a greedy answer each" if samples_per_prompt == 1 else f"{samples_per_prompt} samples each"
    for name, metrics in found.items():
        lines.append(f"{name}: {metrics['prompts']:.0f} prompts, {drawn} (+- is the standard error over prompts)")
        for key in ("accuracy", "reward"):
            lines.append(f"  {key:<12} {metrics[key]:8.4f} +- {metrics[f'{key}_error']:.4f}")
        rest = [key for key in metrics if key not in ("accuracy", "reward", "prompts") and not key.endswith("_error")]
        lines += [f"  {key:<12} {metrics[key]:8.4f}" for key in rest]
    return "\n".join(lines)
