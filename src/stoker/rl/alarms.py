"""What a step's record says that the user should act on: a kind, told once in a run, and a text with the way out."""

from collections.abc import Iterator, Mapping, Sequence

from stoker.batch.warmup import running_median
from stoker.config.schema import RunConfig
from stoker.rl.kl import ALARM_HIGH, alarm
from stoker.rl.state import RunState

__all__ = ["raised", "warmup_spike"]

MANY_EQUAL_GROUPS = 0.8
MANY_EMPTY = 0.1
MANY_UNPARSED = 0.9

Alarm = tuple[str, str]


def raised(record: Mapping[str, float], state: RunState, config: RunConfig) -> Iterator[Alarm]:
    """(kind, text) of each alarm. `state` is that before the step was counted."""
    yield from _of_samples(record, config)
    if "kl/sequence" in record and state.kl.baseline is not None:
        yield from _of_kl(record["kl/sequence"], record["kl/sequence"] - state.kl.baseline, state, config)


def _of_samples(record: Mapping[str, float], config: RunConfig) -> Iterator[Alarm]:
    if record["sample/truncated"] == 1:
        yield (
            "truncated",
            f"every answer was cut at max_new_tokens = {config.sampling.max_new_tokens}, and few such can be right. "
            "Raise sampling.max_new_tokens, or ask for shorter answers in the prompt",
        )
    # Elsewhere a group isn't the baseline, and may be a single sample.
    if config.algorithm.compares_samples and (equal := record["reward/zero_variance_groups"]) > MANY_EQUAL_GROUPS:
        yield (
            "zero_variance",
            f"{equal:.0%} of the groups have equal rewards and teach nothing: choose prompts that the model solves "
            "sometimes, raise sampling.samples_per_prompt or sampling.temperature, or check the reward",
        )
    if missing := record.get("batch/missing_prompts"):
        yield (
            "missing_prompts",
            f"dynamic sampling found {record['batch/prompts']:.0f} of "
            f"{record['batch/prompts'] + missing:.0f} prompts whose answers differ in reward, in "
            f"{record['sample/draws']:.0f} draws, and the step trains on those: choose prompts that the model solves "
            "sometimes, raise sampling.samples_per_prompt, or algorithm.dynamic_sampling_draws",
        )
    if (unparsed := record["reward/unparsed"]) > MANY_UNPARSED:
        yield (
            "unparsed",
            f"no answer was found in {unparsed:.0%} of the samples: look at samples/; show or say in the prompt how an "
            "answer is to be written, or choose a reward that reads these (docs/rewards.md)",
        )
    if (empty := record["sample/empty"]) > MANY_EMPTY:
        yield "empty", f"{empty:.1%} of the answers are empty (the stop token alone); look at samples/"


def _of_kl(measured: float, moved: float, state: RunState, config: RunConfig) -> Iterator[Alarm]:
    """Too loose a leash at once; too tight a one only late and without a gain: short answers needn't move far."""
    adaptive = config.kl.adaptive
    # An adaptive leash goes beyond its target before it comes back to it.
    band = alarm(state.kl, measured, high=max(ALARM_HIGH, 2 * config.kl.target) if adaptive else ALARM_HIGH)
    if band == "high":
        fix = "lower kl.target" if adaptive else "raise kl.coefficient"
        yield (
            "kl_high",
            f"the policy is {moved:.1f} nats per sequence further from its reference than at the start, and may be "
            f"drifting into a hole of the reward: look at samples/, {fix}, or lower optimizer.learning_rate",
        )
    seen = state.evaluations
    gained = len(seen) < 2 or max(one.reward for one in seen[1:]) > seen[0].reward + seen[0].reward_error
    if band == "low" and not gained and state.step + 1 > config.stop.steps / 2:
        yield (
            "kl_low",
            f"half of the run is over, the policy has moved {moved:.2f} nats per sequence from its reference, and the "
            "held-out reward has not risen: lower kl.coefficient, or raise optimizer.learning_rate",
        )


def warmup_spike(norm: float, past: Sequence[float], ratio: float) -> str | None:
    """Why a run should end while the learning rate still rises: it is about to be too high. None: go on.

    A fault of the rate shows late in a linear warm-up, when the rate is no longer tiny, so the whole of it is watched.
    """
    median = running_median(past)
    if not ratio or median is None or norm <= ratio * median:
        return None
    return (
        f"stopped in the warm-up: the gradient norm {norm:.3g} is {norm / median:.1f} times its running median "
        f"{median:.3g} before the learning rate is full. Lower optimizer.learning_rate, or allow more with "
        "optimizer.warmup_stop_ratio (0: never stop)"
    )
