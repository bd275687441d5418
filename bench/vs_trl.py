"""One GRPO step of stoker beside one of TRL: the same model, prompts, reward and sizes, in alternating processes.

64 samples a step (8 prompts x 8), up to 64 new tokens, KL leash 0.04 by k3, temperature 1. Both compute in the
dtype this machine is fastest in; TRL with its own generation, 16 samples in a micro-batch (with all 64 in one it
took 23 GB) and no gradient checkpointing, fp32 weights, under autocast where that dtype is bfloat16. The first
step of each process is left out. Ratios are stoker over TRL; memory is the process's peak.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

from bench.common import ROOT, finish, median_and_spread, workspace
from stoker.record.memory import peak_resident_bytes

MODEL = ROOT / "models" / "smollm2-135m-instruct"
RUN_FILE = ROOT / "examples" / "smollm2_arithmetic.toml"
RATE = 1e-5


class Sizes(NamedTuple):
    """Of one step."""

    prompts: int = 8
    samples: int = 8
    """Of each prompt."""
    new_tokens: int = 64


QUICK = Sizes(prompts=2, new_tokens=32)


def ours(sizes: Sizes, steps: int, folder: Path) -> dict[str, Any]:
    from stoker.config import load as config_load
    from stoker.record.read import Run
    from stoker.runner import train

    overrides = [
        f"runs_dir={folder}",
        "name=ours",
        f"model.path={MODEL}",
        f"stop.steps={steps}",
        f"sampling.prompts_per_step={sizes.prompts}",
        f"sampling.samples_per_prompt={sizes.samples}",
        f"sampling.max_new_tokens={sizes.new_tokens}",
        "sampling.temperature=1.0",
        "kl.coefficient=0.04",
        "kl.estimator=k3",
        f"optimizer.learning_rate={RATE}",
        "validation.holdout=0",
        "validation.sets=[]",
        "validation.every_samples=0",
        f"checkpoint.every_steps={steps + 1}",
    ]
    train(config_load.load(RUN_FILE, overrides), mode="quiet")
    metrics = [record for record in Run.load(folder / "ours").metrics if record["step"] > 0]
    return {
        "seconds": [record["time/step"] for record in metrics],
        "tokens": [record["sample/tokens"] for record in metrics],
        "rewards": [record["reward/mean"] for record in metrics],
    }


def theirs(sizes: Sizes, steps: int, folder: Path) -> dict[str, Any]:
    import torch
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from stoker.config import load as config_load
    from stoker.engine.local.dtype import fastest_dtype
    from stoker.rl import rewards
    from stoker.rl.tasks import read_rows
    from stoker.rl.types import Prompt, Sample, SamplingParams

    config = config_load.load(RUN_FILE)
    rows = [row for found in read_rows(config).train.values() for row in found]
    messages = [
        list(row.content) if not isinstance(row.content, str) else [{"role": "user", "content": row.content}]
        for row in rows
    ]
    system = [{"role": "system", "content": config.task.system_prompt}] if config.task.system_prompt else []
    data = Dataset.from_list(
        [{"prompt": system + one, "answer": row.answer} for one, row in zip(messages, rows, strict=True)]
    )
    suite = rewards.build(config.rewards)

    def reward(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
        import numpy as np

        none = np.zeros(1, dtype=np.int32)
        samples = [
            Sample(Prompt(str(i), (), "", reference), 0, SamplingParams(), 0, none, none, one[0]["content"], "stop")
            for i, (one, reference) in enumerate(zip(completions, answer, strict=True))
        ]
        return [scored.reward or 0.0 for scored in suite(samples, 0)]

    class Clock(TrainerCallback):  # type: ignore[misc]
        def __init__(self) -> None:
            self.seconds: list[float] = []

        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            self.started = time.monotonic()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            self.seconds.append(time.monotonic() - self.started)

    clock = Clock()
    settings = GRPOConfig(
        output_dir=str(folder / "trl"),
        per_device_train_batch_size=2 * sizes.samples,
        gradient_accumulation_steps=sizes.prompts // 2,
        bf16=fastest_dtype(torch.device("cpu")) == "bfloat16",
        gradient_checkpointing=False,
        num_generations=sizes.samples,
        max_completion_length=sizes.new_tokens,
        beta=0.04,
        temperature=1.0,
        learning_rate=RATE,
        max_steps=steps,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = GRPOTrainer(
        model=str(MODEL),
        reward_funcs=reward,
        args=settings,
        train_dataset=data,
        processing_class=AutoTokenizer.from_pretrained(MODEL),
        callbacks=[clock],
    )
    trainer.train()
    suite.close()
    logs = [entry for entry in trainer.state.log_history if "reward" in entry]
    tokens = [entry["completions/mean_length"] * sizes.prompts * sizes.samples for entry in logs]
    return {"seconds": clock.seconds, "tokens": tokens, "rewards": [entry["reward"] for entry in logs]}


def side(name: str, steps: int, *, quick: bool) -> dict[str, Any]:
    """Run one side in a process of its own."""
    command = [
        sys.executable,
        "-m",
        "bench.vs_trl",
        "--side",
        name,
        "--steps",
        str(steps),
        *(["--quick"] if quick else []),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=3600, check=False)
    if done.returncode:
        raise SystemExit(f"{name} failed:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    seconds, tokens = found["seconds"][1:], found["tokens"][1:]
    found["steps_per_s"] = len(seconds) / sum(seconds)
    found["tokens_per_s"] = sum(tokens) / sum(seconds)
    found["reward"] = sum(found["rewards"]) / len(found["rewards"])
    print(f"{name}: {sum(seconds) / len(seconds):.1f} s a step, peak {found['peak'] / 2**30:.2f} GiB", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="smaller steps, fewer of them, and one pair")
    parser.add_argument("--side", choices=("ours", "theirs"), help=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if not MODEL.is_dir():
        raise SystemExit(f"{MODEL} is missing: `make smollm2` makes it")
    if args.side:
        run = ours if args.side == "ours" else theirs
        measured = run(QUICK if args.quick else Sizes(), args.steps, workspace("vs-trl"))
        print(json.dumps({**measured, "peak": peak_resident_bytes()}))
        return
    steps, pairs = (2, 1) if args.quick else (4, 3)
    found = [tuple(side(name, steps, quick=args.quick) for name in ("ours", "theirs")) for _ in range(pairs)]
    ratios = {key: [a[key] / b[key] for a, b in found] for key in ("steps_per_s", "tokens_per_s", "peak")}
    finish(
        {
            "steps_per_s_ratio": median_and_spread(ratios["steps_per_s"])["median"],
            "tokens_per_s_ratio": median_and_spread(ratios["tokens_per_s"])["median"],
            "peak_memory_ratio": median_and_spread(ratios["peak"])["median"],
            "spread": {key: median_and_spread(values) for key, values in ratios.items()},
            "reward_ours": sum(a["reward"] for a, _ in found) / pairs,
            "reward_theirs": sum(b["reward"] for _, b in found) / pairs,
        }
    )


if __name__ == "__main__":
    main()
