"""Every metric of a run: its key, its unit, and what it means. One meaning each, whatever the settings.

Keys are `group/name`; `{name}` stands for what the run file names (a reward, a validation set, a phase).
Means are over the step's samples unless they say otherwise; `nats` are natural-log units.
"""

import re
from collections.abc import Iterable
from typing import NamedTuple

from stoker.record.clock import PHASES

__all__ = ["METRICS", "Metric", "describe", "undescribed"]


class Metric(NamedTuple):
    """What a recorded number counts, and in what."""

    unit: str
    meaning: str


METRICS: dict[str, Metric] = {
    # reward: what the reward functions said of the step's samples
    "reward/mean": Metric("reward", "Mean weighted reward of samples that were scored."),
    "reward/std": Metric("reward", "Standard deviation of the weighted reward over all scored samples."),
    "reward/min": Metric("reward", "Smallest weighted reward."),
    "reward/max": Metric("reward", "Largest weighted reward."),
    "reward/group_std": Metric("reward", "Standard deviation of the reward within a prompt's group, mean over groups."),
    "reward/zero_variance_groups": Metric("share of groups", "Groups of one reward throughout: no signal."),
    "reward/solved": Metric("share of samples", "Samples whose answer the first reward judged right."),
    "reward/unparsed": Metric("share of samples", "Samples in which a rule reward found no answer to check."),
    "reward/overlong": Metric("reward", "Part of the mean reward that is penalty for long answers (overlong_share)."),
    "reward/abstained": Metric("share of samples", "Samples that no reward scored; they leave the step."),
    "reward/{name}/mean": Metric("reward", "Mean of this reward, unweighted, over samples it scored."),
    "reward/{name}/std": Metric("reward", "Standard deviation of this reward over samples it scored."),
    "reward/{name}/abstained": Metric("share of samples", "Samples on which this reward abstained."),
    "reward/{name}/errors": Metric("share of samples", "Samples on which this reward raised."),
    "reward/{name}/timeouts": Metric("share of samples", "Samples whose check passed its deadline and was ended."),
    "reward/{name}/correct": Metric("share of samples", "Rule reward: answers that were right."),
    "reward/{name}/wrong": Metric("share of samples", "Rule reward: answers that were found and wrong."),
    "reward/{name}/unparsed": Metric("share of samples", "Rule reward: samples in which no answer was found."),
    "reward/{name}/truncated": Metric("share of samples", "Rule reward: samples cut before an answer was found."),
    "reward/{name}/{logged}": Metric(
        "its own", "A number that the reward function logged itself, mean over its calls."
    ),
    # sample: the answers
    "sample/prompts": Metric("prompts", "Prompts whose answers were drawn in the step, trained on or not."),
    "sample/count": Metric("samples", "Answers drawn in the step, discarded and greedy ones included."),
    "sample/draws": Metric("draws", "Dynamic sampling: times that prompts were drawn in the step."),
    "sample/discarded": Metric("samples", "Dynamic sampling: answers of groups without spread, not trained on."),
    "sample/tokens": Metric("tokens", "Response tokens drawn in the step."),
    "sample/prompt_tokens": Metric("tokens", "Prompt tokens of the step, each sample's prompt counted."),
    "sample/length_mean": Metric("tokens", "Mean length of an answer, stop token included."),
    "sample/length_max": Metric("tokens", "Longest answer."),
    "sample/length_min": Metric("tokens", "Shortest answer."),
    "sample/truncated": Metric("share of samples", "Answers cut at max_new_tokens."),
    "sample/empty": Metric("share of samples", "Answers without a single token besides the stop token."),
    "sample/left_abstained": Metric("samples", "Samples that left the step: no reward scored them."),
    "sample/left_truncated": Metric("samples", "Samples that left the step: cut, under mask_truncated."),
    "sample/left_empty": Metric("samples", "Samples that left the step: the model wrote no token."),
    "sample/distinct": Metric("share of samples", "Different texts within a group, mean over groups."),
    "sample/concurrent": Metric("samples", "Answers decoded together."),
    # policy: the loss and what the update did
    "policy/loss": Metric("reward", "Policy-gradient part of the loss, mean over the step's updates."),
    "policy/ratio_mean": Metric("ratio", "Mean of new over old probability of a token."),
    "policy/ratio_max": Metric("ratio", "Largest ratio of new over old probability."),
    "policy/clipped": Metric("share of tokens", "Tokens whose ratio was cut by the clip range."),
    "policy/entropy": Metric("nats/token", "Entropy of the full distribution at the sampling temperature."),
    "policy/update_kl": Metric("nats/token", "KL from the policy before the step's updates, estimated by k3."),
    "policy/mismatch": Metric("nats/token", "Mean |log-prob of the trainer - of the sampler|; rounding, or a fault."),
    "policy/mismatch_kl": Metric("nats/token", "KL of the sampler's distribution from the trainer's, by k3."),
    "policy/mismatch_max": Metric("nats", "Largest difference of a token's log-prob between trainer and sampler."),
    "policy/weight_version": Metric("updates", "Optimizer steps behind the policy."),
    # critic: PPO's value model
    "critic/loss": Metric("reward^2", "Value loss, mean over the step's updates."),
    "critic/clipped": Metric("share of tokens", "Values cut by value_clip."),
    "critic/value_mean": Metric("reward", "Mean predicted value."),
    "critic/return_mean": Metric("reward", "Mean return the critic is trained on."),
    "critic/explained_variance": Metric(
        "share", "1 - var(return - value) / var(return) at the step's first update; 1: perfect, <= 0: useless."
    ),
    "critic/grad_norm": Metric("norm", "Norm of the critic's gradient before clipping, mean over updates."),
    "critic/learning_rate": Metric("rate", "Learning rate of the critic's last update."),
    # kl: the leash
    "kl/mean": Metric("nats/token", "KL of the policy from the reference (k1), mean over response tokens."),
    "kl/sequence": Metric("nats/sequence", "KL of the policy from the reference, summed over an answer."),
    "kl/loss": Metric("nats", "KL term of the loss before its coefficient."),
    "kl/coefficient": Metric("reward/nat", "Weight of the leash in this step."),
    # optim: the optimizer step
    "optim/loss": Metric("loss", "Whole loss, mean over the step's updates."),
    "optim/grad_norm": Metric("norm", "Norm of the policy's gradient before clipping, mean over updates."),
    "optim/grad_norm_max": Metric("norm", "Largest gradient norm among the step's updates."),
    "optim/clipped": Metric("share of updates", "Updates whose gradient was cut to max_grad_norm."),
    "optim/skipped": Metric("updates", "Updates refused: not finite, or a spike."),
    "optim/updates": Metric("updates", "Optimizer steps taken in the step."),
    "optim/learning_rate": Metric("rate", "Learning rate of the step's last update."),
    # batch: what the numbers of the plan came to
    "batch/prompts_per_step": Metric("prompts", "Prompts that the step was to train on, by the schedule."),
    "batch/prompts": Metric("prompts", "Prompts that the step trains on."),
    "batch/missing_prompts": Metric("prompts", "Dynamic sampling: planned prompts for which no group was found."),
    "batch/samples": Metric("samples", "Samples that stayed for the update."),
    "batch/tokens": Metric("tokens", "Response tokens that count in the loss."),
    "batch/microbatches": Metric("micro-batches", "Forward/backward passes of the step."),
    "batch/tokens_per_microbatch": Metric("tokens", "Ceiling on padded tokens, after any reduction for memory."),
    "batch/padding": Metric("share of tokens", "Padding among the tokens of the micro-batches."),
    "batch/samples_seen": Metric("samples", "Samples trained on since the start of the run."),
    "batch/noise_scale": Metric(
        "prompts", "Gradient noise scale tr(Sigma) / |G|^2, smoothed over measured updates; absent: undetermined."
    ),
    "batch/noise_scale_low": Metric("prompts", "Lower end of its 95 % interval."),
    "batch/noise_scale_high": Metric("prompts", "Upper end of its 95 % interval."),
    "batch/noise_trace": Metric("norm^2", "tr(Sigma): variance of one prompt's policy gradient, smoothed."),
    "batch/noise_signal": Metric("norm^2", "|G|^2 of the noiseless policy gradient, smoothed; may be negative."),
    "batch/noise_between": Metric("norm^2", "Part of the trace from prompts that differ, smoothed; may be negative."),
    "batch/noise_within": Metric("norm^2", "Part of the trace from the samples of one prompt, smoothed."),
    # time: the clock, per step; money and the bill derive from clock.jsonl
    "time/step": Metric("s", "Time of the whole step on the monotonic clock."),
    "time/tokens_per_second": Metric("tokens/s", "Response tokens over the time of the sample phase."),
    "time/{phase}": Metric("s", "Time of the step in this phase: " + ", ".join(PHASES) + "."),
    # eval: held-out prompts
    "eval/{name}/accuracy": Metric("share of samples", "Held-out answers that were right."),
    "eval/{name}/accuracy_error": Metric("share of samples", "Standard error of the accuracy, over prompts."),
    "eval/{name}/reward": Metric("reward", "Mean reward of held-out answers."),
    "eval/{name}/reward_error": Metric("reward", "Standard error of the held-out reward, over prompts."),
    "eval/{name}/unparsed": Metric("share of samples", "Held-out answers in which no answer was found."),
    "eval/{name}/wrong": Metric("share of samples", "Held-out answers that were found and wrong."),
    "eval/{name}/truncated": Metric("share of samples", "Held-out answers cut at max_new_tokens."),
    "eval/{name}/tokens": Metric("tokens", "Mean length of a held-out answer."),
    "eval/{name}/prompts": Metric("prompts", "Held-out prompts evaluated."),
    "eval/{name}/pass@{k}": Metric("share of prompts", "Chance that k answers to a prompt hold a right one."),
    # memory
    "memory/peak": Metric("bytes", "Peak memory of the device in the step (CPU: of the process so far)."),
}


def _pattern(key: str) -> re.Pattern[str]:
    """`{phase}` only matches a phase, `{k}` a number, any other placeholder one name without a slash."""
    known = {"phase": "|".join(PHASES), "k": r"\d+"}
    parts = re.split(r"\{(\w+)\}", key)
    parts[::2] = map(re.escape, parts[::2])
    parts[1::2] = [f"(?:{known.get(name, '[^/]+')})" for name in parts[1::2]]
    return re.compile("".join(parts))


_PATTERNS = {_pattern(key): metric for key, metric in METRICS.items() if "{" in key}


def describe(key: str) -> Metric | None:
    """Unit and meaning of a recorded key; None where the key is unknown."""
    if "{" in key:
        return None  # a pattern, not a key
    if key in METRICS:
        return METRICS[key]
    return next((metric for pattern, metric in _PATTERNS.items() if pattern.fullmatch(key)), None)


def undescribed(record: Iterable[str]) -> list[str]:
    """Keys of a step's record that METRICS doesn't explain (empty in a sound release)."""
    return [key for key in record if key not in ("step", "attempt") and describe(key) is None]
