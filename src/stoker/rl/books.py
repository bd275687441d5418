"""The books of one step: what happened, as flat metrics (each described in `record.metrics`)."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from stoker.errors import RunError
from stoker.rl.batches import mean_sequence_kl
from stoker.rl.interrupt import Interrupted
from stoker.rl.run import Run
from stoker.rl.types import Group, Scored, TrainBatch, TrainRow

__all__ = ["Books", "rollout_metrics", "sample_record", "step"]

MAXIMA = ("policy/ratio_max", "policy/mismatch_max")
LAST = ("optim/learning_rate", "critic/learning_rate", "batch/tokens_per_microbatch")
SUMS = ("optim/skipped", "batch/microbatches")


@contextmanager
def step(run: Run) -> Iterator["Books"]:
    """One step of the books: recorded when it ends; as if never begun when a signal ends it before its update."""
    run.clock.at_step(run.state.step + 1)
    run.update_in_step = 0
    before = run.prompts.state()
    books = Books(run)
    run.abandonable = True
    try:
        yield books
    except Interrupted:
        run.prompts.restore(before)
        return
    finally:
        run.abandonable = False
    run.state.step += 1
    run.state.samples_seen += run.plan.samples_per_step
    record = books.close()
    run.step_seconds = record["time/step"]
    run.stop_reason = next((reason for watch in run.watchers if (reason := watch(record))), None)


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
        self._updates.append({**gradient, **step})
        if not step.get("optim/skipped"):
            state.updates += 1
            state.nonfinite_updates = 0
            run.sampler.push(state.updates)
            return
        ids = [row.sample_id for row in batch.rows if row.mask.any()]
        norm, loss = step.get("optim/grad_norm", float("nan")), gradient.get("optim/loss", float("nan"))
        finite = np.isfinite([norm, loss]).all()
        what = "gradient spike" if finite else "NaN or infinity in loss or gradient"
        message = f"step {state.step + 1}: {what} (loss {loss:.4g}, gradient norm {norm:.4g}): no update"
        run.recorder.event("skipped_update", message, step=state.step + 1, samples=ids, loss=loss, grad_norm=norm)
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

    def rollout(self, groups: Sequence[Group], rows: Sequence[TrainRow]) -> None:
        """What was sampled and how it was rewarded."""
        run = self._run
        self._record |= rollout_metrics(groups, run.reward.solved)
        self._record |= run.reward.metrics()
        kept = [row for row in rows if row.mask.any()]
        self._record["batch/samples"] = float(len(kept))
        self._record["batch/tokens"] = float(sum(int(row.mask.sum()) for row in kept))
        if kept and kept[0].reference_logprobs is not None:
            kl = mean_sequence_kl(rows)
            assert kl is not None
            self._record |= {"kl/sequence": kl, "kl/coefficient": run.state.kl.coefficient}
        every = run.config.record.samples_every_steps
        extras = {extra["id"]: extra for extra in run.reward.extras()}
        if every and (run.state.step + 1) % every == 0:
            scored = [one for group in groups for one in group.scored]
            self._samples = [
                sample_record(one, row) | extras.get(one.sample.id, {}) for one, row in zip(scored, rows, strict=True)
            ]
        self._say(groups)

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
        return record

    def _say(self, groups: Sequence[Group]) -> None:
        """Alarms with advice, once for each kind in a run of equal steps."""
        run, record = self._run, self._record
        if record["sample/truncated"] == 1.0:
            limit = run.config.sampling.max_new_tokens
            run.warn_once(
                "truncated",
                f"every answer was cut at max_new_tokens = {limit}: no answer can be right. "
                "Raise sampling.max_new_tokens, or ask for shorter answers in the prompt",
            )
        if record["reward/zero_variance_groups"] > 0.8:
            share = record["reward/zero_variance_groups"]
            run.warn_once(
                "zero_variance",
                f"{share:.0%} of the groups have equal rewards and teach nothing: choose prompts that the model solves "
                "sometimes, raise sampling.samples_per_prompt or sampling.temperature, or check the reward",
            )
        if record["sample/empty"] > 0.1:
            share = record["sample/empty"]
            run.warn_once("empty", f"{share:.1%} of the answers are empty (the stop token alone); look at samples/")


def rollout_metrics(groups: Sequence[Group], solved: Callable[[Scored], bool]) -> dict[str, float]:
    """`reward/*` and `sample/*` of a step's groups."""
    scored = [one for group in groups for one in group.scored]
    rewards = np.array([one.reward for one in scored if one.reward is not None], dtype=np.float64)
    lengths = np.array([len(one.sample.token_ids) for one in scored])
    spreads = [
        float(np.std([one.reward for one in group.scored if one.reward is not None]))
        for group in groups
        if any(one.reward is not None for one in group.scored)
    ]
    metrics = {
        "reward/solved": float(np.mean([solved(one) for one in scored])),
        "reward/abstained": 1.0 - len(rewards) / len(scored),
        "reward/zero_variance_groups": float(np.mean([s < 1e-9 for s in spreads])) if spreads else 1.0,
        "reward/unparsed": float(np.mean([one.parsed is False for one in scored])),
        "sample/count": float(len(scored)),
        "sample/tokens": float(lengths.sum()),
        "sample/prompt_tokens": float(sum(len(one.sample.prompt.token_ids) for one in scored)),
        "sample/length_mean": float(lengths.mean()),
        "sample/length_max": float(lengths.max()),
        "sample/length_min": float(lengths.min()),
        "sample/truncated": float(np.mean([one.sample.truncated for one in scored])),
        "sample/empty": float(np.mean([one.sample.text == "" for one in scored])),
        "sample/distinct": float(np.mean([len({o.sample.text for o in g.scored}) / len(g.scored) for g in groups])),
        "batch/prompts": float(len(groups)),
    }
    if len(rewards):
        metrics |= {
            "reward/mean": float(rewards.mean()),
            "reward/std": float(rewards.std()),
            "reward/min": float(rewards.min()),
            "reward/max": float(rewards.max()),
            "reward/group_std": float(np.mean(spreads)),
        }
    return metrics


def sample_record(scored: Scored, row: TrainRow) -> dict[str, Any]:
    """One line of samples/step_N.jsonl.gz."""
    sample = scored.sample
    return {
        "id": sample.id,
        "prompt": sample.prompt.content,
        "answer": sample.prompt.answer,
        "text": sample.text,
        "finish": sample.finish,
        "tokens": len(sample.token_ids),
        "reward": scored.reward,
        "rewards": dict(scored.rewards),
        "parsed": scored.parsed,
        "advantage": float(row.advantages[row.mask].mean()) if row.mask.any() else None,
        "weight_version": sample.weight_version,
    }


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
    """One number for the step: means over updates, but maxima, sums and last values where the key says so."""
    found: dict[str, float] = {}
    for key in dict.fromkeys(key for one in updates for key in one):
        values = [one[key] for one in updates if key in one]
        if key in MAXIMA:
            found[key] = max(values)
        elif key in SUMS:
            found[key] = sum(values)
        else:
            found[key] = values[-1] if key in LAST else sum(values) / len(values)
    return found
