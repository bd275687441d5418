"""The two sides of `bench.vs_trl`, each run in a process of its own: `python -m bench.vs_trl_sides NAME JSON`.

Both train on the same rows with the same reward and the same settings, and then answer the same held-out prompts.
The last line printed is JSON.
"""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.common import ROOT
from stoker.config import load as config_load
from stoker.record.memory import peak_resident_bytes

__all__ = ["MODEL", "Case", "steps_done"]

MODEL = ROOT / "models" / "smollm2-135m-instruct"
RUN_FILE = ROOT / "examples" / "smollm2_arithmetic.toml"
RATE, RANK = 1e-5, 16
STEPS = "steps.jsonl"


@dataclass(frozen=True)
class Case:
    """What one step holds, and how many there are."""

    prompts: int
    samples: int
    """Of each prompt."""
    new_tokens: int
    steps: int
    source: str = "examples/arithmetic.py:problems"
    lora: bool = False
    trl_microbatch: int = 16
    """Samples. TRL is fastest with the largest that fits: all 64 of a step at once took 23 GB."""
    held_out: int = 32


def overrides(case: Case, folder: Path) -> list[str]:
    """The run file as the case has it."""
    return [
        f"runs_dir={folder}",
        "name=ours",
        f"model.path={MODEL}",
        f"task.sources.0.path={case.source}",
        f"stop.steps={case.steps}",
        f"sampling.prompts_per_step={case.prompts}",
        f"sampling.samples_per_prompt={case.samples}",
        f"sampling.max_new_tokens={case.new_tokens}",
        "sampling.temperature=1.0",
        "kl.coefficient=0.04",
        "kl.estimator=k3",
        "algorithm.loss_weighting=sample",  # what TRL calls the loss `grpo`
        "optimizer.betas=[0.9,0.999]",
        "optimizer.warmup_fraction=0",
        "optimizer.decay=constant",
        f"optimizer.learning_rate={RATE}",
        f"validation.holdout={case.held_out}",
        "validation.every_samples=0",
        f"checkpoint.every_steps={case.steps + 1}",
        *([f"lora.rank={RANK}"] if case.lora else []),
    ]


def steps_done(name: str, folder: Path) -> int:
    """Of a side that may still run."""
    path = folder / ("ours/metrics.jsonl" if name == "ours" else STEPS)
    steps = [line.partition(b",")[0] for line in path.read_bytes().splitlines()] if path.exists() else []
    return sum(step.startswith(b'{"step":') and step != b'{"step":0' for step in steps)


def ours(case: Case, folder: Path) -> dict[str, Any]:
    from stoker.record.read import Run
    from stoker.runner import train

    train(config_load.load(RUN_FILE, overrides(case, folder)), mode="quiet")
    peak = peak_resident_bytes()
    run = Run.load(folder / "ours")
    held_out = [value for _, value in run.series("eval/holdout/reward")]
    steps = [record for record in run.metrics if record["step"] > 0]
    return {
        "tokens": [step["sample/tokens"] for step in steps],
        "evaluating": [step.get("time/evaluate", 0.0) for step in steps],
        "start": held_out[0],
        "end": held_out[-1],
        "peak": peak,
    }


def theirs(case: Case, folder: Path) -> dict[str, Any]:
    import torch
    from peft import LoraConfig
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from stoker.engine.local.dtype import fastest_dtype
    from stoker.evaluating import evaluate_model

    config = config_load.load(RUN_FILE, overrides(case, folder))

    class Steps(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            self.done = getattr(self, "done", 0) + 1
            with (folder / STEPS).open("a") as file:
                file.write(json.dumps({"step": self.done, "of": case.steps}, separators=(",", ":")) + "\n")

    microbatch = min(case.trl_microbatch, case.prompts * case.samples)
    settings = GRPOConfig(
        output_dir=str(folder / "trl"),
        per_device_train_batch_size=microbatch,
        gradient_accumulation_steps=case.prompts * case.samples // microbatch,
        bf16=fastest_dtype(torch.device("cpu")) == "bfloat16",
        gradient_checkpointing=False,
        num_generations=case.samples,
        max_completion_length=case.new_tokens,
        beta=0.04,
        loss_type="grpo",
        temperature=1.0,
        learning_rate=RATE,
        lr_scheduler_type="constant",
        max_steps=case.steps,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    with scores(config) as score:
        trainer = GRPOTrainer(
            model=str(MODEL),
            reward_funcs=score,
            args=settings,
            train_dataset=dataset(config),
            processing_class=AutoTokenizer.from_pretrained(MODEL),
            callbacks=[Steps()],
            peft_config=LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear") if case.lora else None,
        )
        trainer.train()
    peak = peak_resident_bytes()
    logs = [entry for entry in trainer.state.log_history if "reward" in entry]
    tokens = [entry["completions/mean_length"] * case.prompts * case.samples for entry in logs]
    trainer.save_model(str(folder / "policy"))
    start, end = (evaluate_model(str(path), config, 1)["holdout"]["reward"] for path in (MODEL, folder / "policy"))
    return {"tokens": tokens, "evaluating": [0.0] * len(tokens), "start": start, "end": end, "peak": peak}


def dataset(config: Any) -> Any:
    """The training rows, as TRL takes them."""
    from datasets import Dataset

    from stoker.rl.tasks import read_rows

    rows = [row for found in read_rows(config).train.values() for row in found]
    return Dataset.from_list([{"prompt": list(row.content), "answer": row.answer} for row in rows])


@contextmanager
def scores(config: Any) -> Iterator[Any]:
    """The run file's reward with TRL's signature."""
    import numpy as np

    from stoker.rl import rewards
    from stoker.rl.types import Prompt, Sample, SamplingParams

    suite = rewards.build(config.rewards)
    none = np.zeros(1, dtype=np.int32)

    def score(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
        samples = [
            Sample(Prompt(str(i), (), "", reference), 0, SamplingParams(), 0, none, none, one[0]["content"], "stop")
            for i, (one, reference) in enumerate(zip(completions, answer, strict=True))
        ]
        return [scored.reward or 0.0 for scored in suite(samples, 0)]

    try:
        yield score
    finally:
        suite.close()


def main() -> None:
    name, given = sys.argv[1], json.loads(sys.argv[2])
    run = {"ours": ours, "theirs": theirs}[name]
    print(json.dumps(run(Case(**given["case"]), Path(given["folder"]))))


if __name__ == "__main__":
    main()
