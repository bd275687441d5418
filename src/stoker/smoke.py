"""`--smoke`: one real step, end to end, with small sizes, and an audit of the reward, before any long run."""

import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from stoker.batch import plan
from stoker.config.schema import RunConfig, Schedule
from stoker.record.printable import printable
from stoker.record.read import Run, read_samples
from stoker.rl import rewards, tasks
from stoker.rl.rewards import AuditLine
from stoker.rl.types import Prompt
from stoker.runner import train

__all__ = ["SmokeReport", "small", "smoke"]

PROMPTS, SAMPLES, TOKENS, HELD_OUT, WARM_UPDATES = 4, 4, 64, 8, 2


@dataclass(frozen=True)
class SmokeReport:
    """What one small step did."""

    notes: list[str]
    """What was read."""
    seconds: dict[str, float]
    """By phase."""
    metrics: dict[str, float]
    samples: list[dict[str, Any]]
    audit: list[AuditLine]
    warnings: list[str]
    """Of the run file's own sizes, and of the step."""

    @property
    def ok(self) -> bool:
        """The step ran (or an error would have come) and the reward ranks known answers rightly."""
        return all(line.ok for line in self.audit)

    def to_json(self) -> dict[str, Any]:
        return {
            "ok": self.ok,
            "notes": self.notes,
            "seconds": self.seconds,
            "metrics": self.metrics,
            "samples": self.samples,
            "audit": [asdict(line) for line in self.audit],
            "warnings": self.warnings,
        }

    def __str__(self) -> str:
        warned = [f"warning: {warning}" for warning in self.warnings]
        return "\n".join([*self.notes, *self._phases(), "", *self._answers(), "", *self._audited(), *warned])

    def _phases(self) -> Iterator[str]:
        m = self.metrics
        told = {
            "setup": f"read the data and loaded the model (a warm start is cut to {WARM_UPDATES} updates)",
            "evaluate": "answered held-out prompts, twice",
            "sample": f"drew {m['sample/count']:.0f} answers of {m['sample/prompts']:.0f} prompts, "
            f"{m['sample/tokens']:.0f} tokens, {m['sample/truncated']:.0%} cut at the limit",
            "reward": f"mean {m.get('reward/mean', 0):.3f}, {m['reward/solved']:.0%} right, "
            f"{m['reward/unparsed']:.0%} without an answer, {m['reward/abstained']:.0%} not scored",
            "score": "log-probs of the reference and of older policies, values, as far as needed",
            "update": f"optimizer steps: {m['optim/updates']:.0f}, gradient norm "
            f"{m.get('optim/grad_norm', 0):.3g}; trainer and sampler differ by {m.get('policy/mismatch', 0):.1e} nats",
            "checkpoint": "saved everything that a resume needs",
        }
        yield "one small step with the real model, data and reward:"
        for phase, text in told.items():
            if phase in self.seconds:
                yield f"  {phase:<10} {self.seconds[phase]:7.2f} s  {text}"

    def _answers(self) -> Iterator[str]:
        yield "answers:"
        for one in self.samples[:3]:
            asked = one["prompt"] if isinstance(one["prompt"], str) else one["prompt"][-1]["content"]
            reward = "none" if one["reward"] is None else f"{one['reward']:.3g}"
            said = f"{_line(asked)[-60:]} -> {_line(one['text'])[:90]}"
            yield f"  reward {reward}  (reference {_line(one['answer'])})  {said}"

    def _audited(self) -> Iterator[str]:
        wrong = [line for line in self.audit if not line.ok]
        if not self.audit:
            yield "reward audit: no prompt has a reference answer to build known answers from"
            return
        yield f"reward audit: {len(self.audit) - len(wrong)} of {len(self.audit)} known answers rank as they must"
        for line in wrong:
            trick = f" ({line.trick})" if line.trick else ""
            yield f"  NOT OK  {line.kind}{trick} scored {line.score}: {printable(line.text)[:70]}"


def _line(text: object) -> str:
    return printable(str(text)).replace("\n", " | ")


def small(config: RunConfig, runs_dir: str) -> RunConfig:
    """The run with one small step; model, data, reward and algorithm stay what they are."""
    sampling = {
        "prompts_per_step": min(PROMPTS, config.sampling.prompts_per_step),
        "samples_per_prompt": min(SAMPLES, config.sampling.samples_per_prompt),
        "max_new_tokens": min(TOKENS, config.sampling.max_new_tokens),
    }
    sets = tuple(one.model_copy(update={"rows": min(one.rows or HELD_OUT, HELD_OUT)}) for one in config.validation.sets)
    update: dict[str, Any] = {"samples_per_update": 0}
    if config.update.tokens_per_microbatch == "auto":  # a fit takes longer than this step
        update["tokens_per_microbatch"] = config.task.max_prompt_tokens + sampling["max_new_tokens"]
    validation = {"holdout": min(config.validation.holdout, HELD_OUT), "sets": sets}
    warm_updates = min(WARM_UPDATES, config.warm_start.updates)
    return config.model_copy(
        update={
            "name": f"{config.name}-smoke",
            "runs_dir": runs_dir,
            "sampling": config.sampling.model_copy(update=sampling),
            "validation": config.validation.model_copy(update=validation),
            "warm_start": config.warm_start.model_copy(update={"updates": warm_updates}),
            "schedule": Schedule(),
            "update": config.update.model_copy(update=update),
            "stop": config.stop.model_copy(update={"steps": 1}),
            "record": config.record.model_copy(update={"samples_every_steps": 1, "trackers": ()}),
        }
    )


def smoke(config: RunConfig) -> SmokeReport:
    """Run the small step in a temporary folder and audit the reward. Raises StokerError where a part fails."""
    rows = tasks.read_rows(config)
    with tempfile.TemporaryDirectory(prefix="stoker-smoke-") as folder:
        try:
            result = train(small(config, folder), mode="silent")
        except BaseException as error:
            error.__notes__ = []  # they tell of a run folder that is gone by then
            raise
        run = Run.load(result.folder)
        made = plan.from_json((result.folder / "batch_plan.json").read_text(encoding="utf-8"))
        warnings = plan.make(config, made.parameters, made.trained_parameters).warnings
        alarms = [one["message"] for one in run.events if one.get("step") == 1 and one["kind"] not in ("note", "end")]
        return SmokeReport(
            notes=list(rows.notes),
            seconds=run.seconds_by_phase(),
            metrics=run.metrics[-1],
            samples=read_samples(result.folder / "samples" / "step_1.jsonl.gz"),
            audit=audit(config, rows),
            warnings=[*warnings, *(f"in this step, {alarm}" for alarm in alarms)],
        )


def audit(config: RunConfig, rows: tasks.TaskRows) -> list[AuditLine]:
    """Known right, wrong, unparsable and gamed answers to the task's own rows, scored."""
    prompts = [
        Prompt(row.id, (), row.content, row.answer, row.columns, row.source)
        for found in rows.train.values()
        for row in found[:64]
    ]
    suite = rewards.build(config.rewards)
    try:
        return suite.audit(prompts, taught=config.warm_start.updates > 0)
    finally:
        suite.close()
