"""The models that a reinforcement-learning run holds together, as set-ups of `stoker.memory`. No torch here."""

from dataclasses import replace
from pathlib import Path

from stoker import embedded
from stoker.config.schema import Optimizer, RunConfig
from stoker.errors import ConfigError
from stoker.memory import ModelShape, Setup, shape_of

__all__ = ["roles_of"]

PRECISIONS = {"float32": "fp32", "bfloat16": "master, fp32 gradients", "float16": "master, fp32 gradients"}
"""Of a trained model: 16-bit weights have an fp32 master, and their gradients are summed in fp32."""
SCORING = {"float32": "fp32", "bfloat16": "bf16", "float16": "bf16"}


def roles_of(config: RunConfig) -> dict[str, tuple[ModelShape, Setup]]:
    """Policy, reference and critic of a run, at its longest samples; the policy with the cache of its sampling.

    Raises ConfigError where a run only learns when it starts what is needed here ('auto'), or a family isn't known.
    """
    longest = config.task.max_prompt_tokens + config.sampling.max_new_tokens
    microbatch = config.update.tokens_per_microbatch
    if not isinstance(microbatch, int) or config.model.dtype == "auto":
        key = "model.dtype=bfloat16" if config.model.dtype == "auto" else "update.tokens_per_microbatch=8192"
        raise ConfigError(f"'auto' is decided when a run starts; say what to count with, as in {key}")
    shape = _shape(config.model.path)
    sampling = config.sampling
    groups = -(-sampling.concurrent_samples // sampling.samples_per_prompt)  # a group's prompt is kept once
    policy = Setup(
        examples=max(1, microbatch // longest),
        tokens=longest,
        precision=PRECISIONS[config.model.dtype],
        optimizer=_kind(config.optimizer),
        checkpointing=config.update.activation_gib == 0,
        attention="flash" if config.model.attention == "sdpa" else "eager",
        dropout=False,
        loss="logsumexp",
        logits_chunk=config.update.logits_per_chunk,
        accumulating=True,
        lora_rank=config.lora.rank,
        cache_tokens=groups * config.task.max_prompt_tokens + sampling.concurrent_samples * sampling.max_new_tokens,
        cache_bytes=4 if config.model.dtype == "float32" else 2,
        device="cpu" if config.model.device == "cpu" else "cuda",
    )
    found = {"policy": (shape, policy)}
    if config.kl.coefficient and (config.reference.path or not config.lora.rank):
        dtype = config.reference.dtype or config.model.dtype
        scoring = replace(policy, precision=SCORING[dtype], optimizer="none", lora_rank=0, cache_tokens=0)
        found["reference"] = (_shape(config.reference.path or config.model.path), scoring)
    if config.algorithm.needs_critic:
        critic = replace(policy, optimizer=_kind(config.critic.optimizer), loss="none", cache_tokens=0)
        found["critic"] = (_shape(config.critic.path or config.model.path), critic)
    return found


def _shape(path: str) -> ModelShape:
    name = path.removeprefix("embedded:")
    folder = Path(str(embedded.folder(name))) if name != path else Path(path).expanduser()
    if not folder.exists():
        raise ConfigError(f"{path}: no such folder here, so its config can't be read; give the model's folder")
    return shape_of(folder)


def _kind(optimizer: Optimizer) -> str:
    if optimizer.name == "sgd":
        return "sgd_momentum" if optimizer.momentum else "sgd"
    return optimizer.name
