"""Supervised learning on the task's own answers, before RL: a policy that never succeeds can't be rewarded."""

from collections.abc import Callable, Sequence

import numpy as np

from stoker.config.schema import RunConfig
from stoker.errors import DataError, RunError
from stoker.rl.ports import Learner, PromptSource
from stoker.rl.types import Objective, Prompt, TrainBatch, TrainRow
from stoker.rl.updates import weigh

__all__ = ["answer_rows", "warm_start"]


def answer_rows(prompts: Sequence[Prompt], encode: Callable[[str], list[int]]) -> list[TrainRow]:
    """Rows whose response is the reference answer; `encode` ends it with the token that stops an answer.

    Raises DataError for a prompt without a reference answer.
    """
    rows = []
    for prompt in prompts:
        if prompt.answer is None:
            raise DataError(
                f"row {prompt.id} has no reference answer to learn from: give the task an answer column, "
                "or set warm_start.updates = 0"
            )
        token_ids = np.array(encode(prompt.answer), dtype=np.int32)
        zeros = np.zeros(len(token_ids), dtype=np.float32)
        mask = np.ones(len(token_ids), dtype=np.bool_)
        rows.append(TrainRow(f"{prompt.id}/answer", prompt.token_ids, token_ids, mask, zeros, zeros, zeros))
    return rows


def warm_start(
    config: RunConfig,
    learner: Learner,
    prompts: PromptSource,
    encode: Callable[[str], list[int]],
    progress: Callable[[int, int, float], None],
) -> float:
    """`warm_start.updates` supervised updates (fewer once the smoothed loss is low enough); returns that loss.

    `progress(done, total, loss)` is called after each; it may raise to stop. Raises RunError where the
    loss stops being finite.
    """
    settings, smoothed = config.warm_start, float("nan")
    for update in range(settings.updates):
        rows = answer_rows(prompts.take(settings.examples_per_update), encode)
        batch = TrainBatch(tuple(weigh(rows, "token", config.sampling.max_new_tokens)))
        loss = learner.forward_backward(batch, Objective("sft"))["optim/loss"]
        if learner.step(0)["optim/skipped"]:
            raise RunError(
                f"the warm start's update {update + 1} was refused (loss {loss:.4g}): lower warm_start.learning_rate"
            )
        smoothed = loss if update == 0 else 0.9 * smoothed + 0.1 * loss
        progress(update + 1, settings.updates, smoothed)
        if smoothed < settings.stop_at_loss:
            break
    return smoothed
