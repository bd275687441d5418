"""Write docs/metrics.md from the descriptions of the metrics and of the clock's phases; `--check` only compares."""

import sys
from collections.abc import Iterator
from pathlib import Path

from stoker.record.clock import PHASES
from stoker.record.metrics import METRICS

TARGET = Path(__file__).parents[1] / "docs" / "metrics.md"
INTRODUCTION = """\
# What a run prints and keeps

## The table

A row a step, of these metrics:

| column | metric | |
|---|---|---|
| reward | `reward/mean` | mean weighted reward of the step's samples, after a length penalty, before the KL's charge |
| held-out | `eval/{name}/accuracy` | share of held-out answers that are right; step 0: before RL |
| KL | `kl/mean` | nats per token between policy and reference; empty without a leash |
| grad | `optim/grad_norm` | norm of the gradient before clipping (`optimizer.max_grad_norm`) |
| tokens | `sample/length_mean` | mean length of an answer |
| cut | `sample/truncated` | share of answers cut at `sampling.max_new_tokens` |
| s/step | `time/step` | seconds of the step, evaluation included |
| ETA | | steps left times the median of the last 20 steps |

Held-out answers are greedy unless `validation.samples_per_prompt` is above 1; several sets count equally. An answer is
*right* where the first reward that scored it gave the highest value of its range: 1 with `math` and `exact`, the upper
end of `range` with your own function. A reward that never reaches that end has an accuracy of 0, however well the
policy does: set `range` to what the function returns.

## The run folder

| file | holds |
|---|---|
| `config.toml` | the resolved run file, every default written out; `--resume` compares with it |
| `batch_plan.json` | the batch plan as numbers |
| `environment.json` | machine, versions, commit |
| `metrics.jsonl` | a line a step: the metrics below |
| `samples/step_N.jsonl.gz`, `samples/eval_SET_step_N.jsonl.gz` | each answer with its rewards |
| `events.jsonl` | warnings, notes, starts and ends |
| `clock.jsonl` | which phase the device's time went to |
| `curve.svg` | held-out accuracy, reward and answer length |
| `checkpoints/step_N/policy` | the model, for `from_pretrained`; what lies beside it is for `--resume` |
| `reference` | the initial policy, where the KL leash needs it |
| `profile.json`, `trace.json.gz` | with `--profile` ([Profiling](profiling.md)) |

`--json` prints each step's metrics as one line, and other news as `{"event": ..., "text": ...}`.

## Phases

Each second of a run belongs to one of these; they are the rows of a profile too.

| phase | |
|---|---|
"""
METRICS_HEAD = """
## Metrics

Keys are `group/name`; `{name}` stands for a name of the run file. Means are over the step's samples unless they say
otherwise; nats are natural-log units. The same keys go to TensorBoard and Weights & Biases (`record.trackers`).

| metric | unit | |
|---|---|---|
"""


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def page() -> Iterator[str]:
    """The page, piece by piece."""
    yield INTRODUCTION
    for name, meaning in PHASES.items():
        yield f"| `{name}` | {_cell(meaning)} |\n"
    yield METRICS_HEAD
    for key, metric in METRICS.items():
        yield f"| `{key}` | {_cell(metric.unit)} | {_cell(metric.meaning)} |\n"


def main() -> int:
    """Write the page, or with `--check` say whether it is up to date."""
    text = "".join(page())
    if "--check" in sys.argv[1:]:
        if TARGET.exists() and TARGET.read_text(encoding="utf-8") == text:
            return 0
        print("docs/metrics.md is out of date: run scripts/make_metric_docs.py")
        return 1
    TARGET.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
