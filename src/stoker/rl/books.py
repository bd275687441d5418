"""The books of one step: what happened, as flat metrics (each described in `record.metrics`)."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from stoker.errors import RunError
from stoker.rl import alarms, noise
from stoker.rl.advantages import deviation
from stoker.rl.batches import counted_tokens, mean_sequence_kl
from stoker.rl.interrupt import Interrupted
from stoker.rl.rollout import Rollout
from stoker.rl.run import Run
from stoker.rl.sampling import sample_record
from stoker.rl.select import departures
from stoker.rl.types import Group, Scored, TrainBatch, TrainRow

__all__ = ["Books", "rollout_metrics", "step"]

MAXIMA = ("policy/ratio_max", "policy/mismatch_max")
LAST = ("optim/learning_rate", "critic/learning_rate", "batch/tokens_per_microbatch")
SUMS = ("optim/skipped", "batch/microbatches")
FIRST = ("critic/explained_variance",)  # later updates have trained on some of the same tokens


@contextmanager
def step(run: Run) -> Iterator["Books"]:
    """One step of the books: recorded when it ends; as if never begun when a signal ends it before its update."""
    run.clock.at_step(run.state.step + 1)
    run.update_in_step = 0
    prompts, sampler = run.prompts.state(), run.sampler.state()
    books = Books(run)
    run.abandonable = True
    try:
        yield books
    except Interrupted:
        run.prompts.restore(prompts)
        run.sampler.restore(sampler)
        return
    finally:
        run.abandonable = False
    run.state.samples_seen, run.state.step = run.state.samples_seen + run.stage.samples_per_step, run.state.step + 1
    run.follow_noise()
    record = books.close()
    run.step_seconds = record["time/step"]
    asked = [reason for watch in run.watchers if (reason := watch(record))]
    run.stop_reason = next(iter(asked), None) or _watch_warmup(run, record)


def _watch_warmup(run: Run, record: Mapping[str, float]) -> str | None:
    norm = record.get("optim/grad_norm", 0.0)
    if not norm or run.state.samples_seen > run.plan.warmup_samples:
        return None
    reason = alarms.warmup_spike(norm, run.state.warmup_norms, run.config.optimizer.warmup_stop_ratio)
    run.state.warmup_norms.append(norm)
    return reason


class Books:
    """Collects a step's metrics and writes them when it ends."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._started = run.clock.elapsed()
        self._totals = run.clock.totals()
        self._updates: list[dict[str, float]] = []
        self._record: dict[str, float] = {}
        self._samples: list[dict[str, Any]] = []

    def update(self, batch: TrainBatch, gradient: Mapping[str, float], step: Mapping[str, float]) -> None:
        """One optimizer step, taken or refused. Raises RunError after too many refused ones in a row."""
        run, state = self._run, self._run.state
        looked, gradient = noise.split(gradient)
        if looked:
            run.noise.add(looked)
            self._record |= run.noise.metrics()
        self._updates.append({**gradient, **step})
        if not step.get("optim/skipped"):
            state.updates += 1
            state.nonfinite_updates = 0
            run.sampler.push(state.updates)
            return
        ids = [row.sample_id for row in batch.rows if row.mask.any()]
        # Of policy and critic: either may be why both were held back.
        facts = {
            key: value for key, value in (*gradient.items(), *step.items()) if key.endswith(("/loss", "/grad_norm"))
        }
        finite = all(map(math.isfinite, facts.values()))
        what = "gradient spike" if finite else "NaN or infinity in loss or gradient"
        told = ", ".join(f"{key} {value:.4g}" for key, value in facts.items())
        message = f"step {state.step + 1}: {what} ({told}): no update"
        run.recorder.event("skipped_update", message, step=state.step + 1, samples=ids, facts=facts)
        where = f"; its samples are in events.jsonl: {', '.join(ids[:4])}{', ...' if len(ids) > 4 else ''}"
        run.display.warn(message + where)
        if finite:
            return
        run.recorder.bad_batch(state.step + 1, [_row_record(row) for row in batch.rows])
        state.nonfinite_updates += 1
        if state.nonfinite_updates >= run.config.stop.max_nonfinite_updates:
            raise RunError(
                f"{state.nonfinite_updates} updates in a row had a NaN or infinite loss or gradient; the last is in "
                "samples/bad_step_*.jsonl.gz. Lower optimizer.learning_rate, or use model.dtype = 'float32', "
                "and resume from the last good checkpoint"
            )

    def rollout(self, rollout: Rollout, rows: Sequence[TrainRow]) -> None:
        """What was sampled and how it was rewarded, trained on or not. `rows` are those of the rollout's groups."""
        run, groups = self._run, rollout.groups
        self._record |= rollout_metrics(rollout.drawn, run.reward.solved)
        self._record |= run.reward.metrics()
        self._record["batch/prompts"] = float(len(groups))
        self._record["batch/prompts_per_step"] = float(rollout.planned)
        if run.config.algorithm.dynamic_sampling_draws > 1:
            discarded = sum(len(group.scored) for group in rollout.discarded)
            self._record |= {"sample/draws": float(rollout.draws), "sample/discarded": float(discarded)}
            self._record["batch/missing_prompts"] = float(rollout.missing)
        algorithm = run.config.algorithm
        left = departures(
            groups, mask_truncated=algorithm.mask_truncated, bootstrap_truncated=algorithm.bootstrap_truncated
        )
        self._record |= {f"sample/left_{reason}": float(count) for reason, count in left.items()}
        tokens = counted_tokens(rows)
        self._record["batch/samples"] = float((tokens > 0).sum())
        self._record["batch/tokens"] = float(tokens.sum())
        kl = mean_sequence_kl(rows) if all(row.reference_logprobs is not None for row in rows) else None
        if kl is not None:
            self._record |= {"kl/sequence": kl, "kl/coefficient": run.state.kl.coefficient}
        every = run.config.record.samples_every_steps
        extras = {extra["id"]: extra for extra in run.reward.extras()}
        if every and (run.state.step + 1) % every == 0:
            scored = [one for group in groups for one in group.scored]
            unused = [one for group in rollout.discarded for one in group.scored]
            told = [(one, _advantage(row)) for one, row in zip(scored, rows, strict=True)]
            told += [(one, {"discarded": True}) for one in unused]
            told += [(group.greedy, {"greedy": True}) for group in rollout.drawn if group.greedy is not None]
            self._samples = [sample_record(one) | facts | extras.get(one.sample.id, {}) for one, facts in told]
        for kind, text in alarms.raised(self._record, run.state, run.config):
            run.warn_once(kind, text)

    def evaluation(self, metrics: Mapping[str, float]) -> None:
        self._record |= metrics

    def close(self) -> dict[str, float]:
        """Write the step's line and show it."""
        run, state = self._run, self._run.state
        record = {"step": float(state.step), **self._record, **_over_updates(self._updates)}
        record["optim/updates"] = float(sum(not one.get("optim/skipped") for one in self._updates))
        record |= {"policy/weight_version": float(state.updates), "batch/samples_seen": float(state.samples_seen)}
        sampling = run.sampler.state()
        if "concurrent_samples" in sampling:
            record["sample/concurrent"] = float(sampling["concurrent_samples"])
        totals = run.clock.totals()
        spent = {name: seconds - self._totals.get(name, 0.0) for name, seconds in totals.items()}
        record |= {f"time/{name}": seconds for name, seconds in spent.items() if seconds > 0}
        record["time/step"] = run.clock.elapsed() - self._started
        if spent.get("sample"):
            record["time/tokens_per_second"] = record["sample/tokens"] / spent["sample"]
        record |= run.learner.memory()
        run.recorder.metrics(state.step, {key: value for key, value in record.items() if key != "step"})
        if self._samples:
            run.recorder.samples(state.step, self._samples)
        run.display.step(record)
        run.tell([*run.learner.notes, *run.sampler.notes])
        return record


def rollout_metrics(groups: Sequence[Group], solved: Callable[[Scored], bool]) -> dict[str, float]:
    """`reward/*` and `sample/*` of a step's groups. Greedy answers are counted as drawn, and no more."""
    scored = [one for group in groups for one in group.scored]
    greedy = [len(group.greedy.sample.token_ids) for group in groups if group.greedy is not None]
    rewards = np.array([one.reward for one in scored if one.reward is not None], dtype=np.float64)
    lengths = np.array([len(one.sample.token_ids) for one in scored])
    of_groups = [np.array([one.reward for one in group.scored if one.reward is not None]) for group in groups]
    of_groups = [found for found in of_groups if len(found)]
    equal = [deviation(found) == 0 for found in of_groups]
    metrics = {
        "reward/solved": float(np.mean([solved(one) for one in scored])),
        "reward/abstained": 1.0 - len(rewards) / len(scored),
        "reward/zero_variance_groups": float(np.mean(equal)) if equal else 1.0,
        "reward/unparsed": float(np.mean([one.parsed is False for one in scored])),
        "sample/prompts": float(len(groups)),
        "sample/count": float(len(scored) + len(greedy)),
        "sample/tokens": float(lengths.sum() + sum(greedy)),
        "sample/prompt_tokens": float(
            sum(len(group.prompt.token_ids) * (len(group.scored) + (group.greedy is not None)) for group in groups)
        ),
        "sample/length_mean": float(lengths.mean()),
        "sample/length_max": float(lengths.max()),
        "sample/length_min": float(lengths.min()),
        "sample/truncated": float(np.mean([one.sample.truncated for one in scored])),
        "sample/empty": float(np.mean([one.sample.text == "" for one in scored])),
        "sample/distinct": float(np.mean([len({o.sample.text for o in g.scored}) / len(g.scored) for g in groups])),
    }
    if penalties := [one.rewards["overlong"] for one in scored if one.rewards.get("overlong")]:
        metrics["reward/overlong"] = math.fsum(penalty or 0.0 for penalty in penalties) / len(scored)
    if len(rewards):
        metrics |= {
            "reward/mean": float(rewards.mean()),
            "reward/std": float(rewards.std()),
            "reward/min": float(rewards.min()),
            "reward/max": float(rewards.max()),
            "reward/group_std": float(np.mean([found.std() for found in of_groups])),
        }
    return metrics


def _advantage(row: TrainRow) -> dict[str, Any]:
    """Mean over the sample's counted tokens; nothing for a sample that left."""
    return {"advantage": float(row.advantages[row.mask].mean())} if row.mask.any() else {}


def _row_record(row: TrainRow) -> dict[str, Any]:
    """A training row whole, to look into what broke an update."""
    arrays = (
        "advantages",
        "weights",
        "sampler_logprobs",
        "old_logprobs",
        "reference_logprobs",
        "old_values",
        "returns",
    )
    given = {name: getattr(row, name) for name in arrays}
    return {
        "id": row.sample_id,
        "prompt_ids": list(row.prompt_ids),
        "token_ids": row.token_ids.tolist(),
        **{name: values.tolist() for name, values in given.items() if values is not None},
    }


def _over_updates(updates: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """One number for the step: means over updates, but maxima, sums, first and last values where the key says so."""
    found: dict[str, float] = {}
    for key in dict.fromkeys(key for one in updates for key in one):
        values = [one[key] for one in updates if key in one]
        if key in MAXIMA:
            found[key] = max(values)
        elif key in SUMS:
            found[key] = sum(values)
        elif key in FIRST:
            found[key] = values[0]
        else:
            found[key] = values[-1] if key in LAST else sum(values) / len(values)
    if norms := [one["optim/grad_norm"] for one in updates if "optim/grad_norm" in one]:
        found["optim/grad_norm_max"] = max(norms)
    return found
