"""The method, on one screen: sample, reward, advantage, update; on-policy.

Every name here is a port (sampler, learner, reward), a pure function, or the run that holds them.
Timing, recovery and records live in the context managers; what they do is in `rl.books` and `rl.run`.
"""

from functools import partial

from stoker.rl.batches import rows_from_groups, with_advantages
from stoker.rl.books import step
from stoker.rl.rollout import Rollout
from stoker.rl.run import Run
from stoker.rl.sampling import draw, draw_seed, greedy_params, groups_by_prompt, sampling_params
from stoker.rl.updates import updates

__all__ = ["train"]


def train(run: Run) -> str:
    """Train until the plan, an evaluation, a watcher or a signal ends it; returns which, in words."""
    config, state = run.config, run.state
    sampling, algorithm, update = config.sampling, config.algorithm, config.update
    params, greedy = sampling_params(sampling), greedy_params(sampling) if algorithm.needs_greedy else None
    run.evaluate_start()
    while (ending := run.ending()) is None:
        with step(run) as books:  # abandoned whole if a signal comes before its first update
            rollout = Rollout(run.stage.prompts_per_step, sampling.max_new_tokens, algorithm)
            for prompts in rollout.draws_from(run.prompts):  # once, but for dynamic sampling
                with run.phase("sample"):
                    seed = draw_seed(config.seed, "train", state.step)
                    begin = partial(run.reward.begin, step=state.step)  # rewards with workers, beside the sampling
                    samples = draw(
                        run.sampler, prompts, sampling.samples_per_prompt, params, seed, greedy=greedy, group_done=begin
                    )
                with run.phase("reward"):
                    rollout.add(groups_by_prompt(run.reward(samples, state.step)))
            groups = rollout.groups
            rows = rows_from_groups(
                groups, mask_truncated=algorithm.mask_truncated, bootstrap_truncated=algorithm.bootstrap_truncated
            )
            with run.phase("score"):
                rows = run.scored(rows)  # old, reference and critic, as far as the algorithm needs them
            rows = with_advantages(rows, groups, algorithm, run.penalty())
            run.commit()
            for batch in updates(
                rows,
                samples_per_update=update.samples_per_update,
                epochs=update.epochs_per_step,
                weighting=algorithm.loss_weighting,
                max_new_tokens=sampling.max_new_tokens,
                seed=config.seed,
                step=state.step,
                measure=run.measure(),
            ):
                with run.phase("update"):
                    gradient = run.learner.forward_backward(batch, run.objective())
                    books.update(batch, gradient, run.learner.step(run.samples_after_update(), run.growth))
            books.rollout(rollout, rows)
            run.adapt(rows)
            if run.evaluation_due():
                books.evaluation(run.evaluate())
        run.checkpoint_if_due()
    return ending
