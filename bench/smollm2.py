"""A real pre-trained model learns: SmolLM2-135M-Instruct on `examples/smollm2_arithmetic.toml`, over seeds.

Held-out greedy accuracy before and after, over all prompts and over those whose first answer parsed (what is
gained beyond the form of an answer); right, wrong, unparsed and truncated apart; and the saved policy's accuracy
by transformers' own `generate`. For the last, both sides compute in fp32, so that rounding flips no token.
"""

import time
from pathlib import Path
from typing import Any

from bench.common import ROOT, arguments, finish, stoker_train, workspace
from stoker.record.read import read_samples

RUN_FILE = ROOT / "examples" / "smollm2_arithmetic.toml"


def answers(folder: Path, step: int) -> dict[str, dict[str, Any]]:
    """Held-out answers at a step, by prompt."""
    records = read_samples(folder / "samples" / f"eval_holdout_step_{step}.jsonl.gz")
    return {record["id"]: record for record in records}


def shares(records: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Right + wrong + unparsed = 1; truncated overlaps them."""
    found = list(records.values())
    right = sum(one["reward"] == 1.0 for one in found) / len(found)
    unparsed = sum(one["parsed"] is False for one in found) / len(found)
    truncated = sum(one["finish"] == "length" for one in found) / len(found)
    return {"right": right, "wrong": 1 - right - unparsed, "unparsed": unparsed, "truncated": truncated}


def by_transformers(policy: Path, overrides: list[str]) -> float:
    """Greedy accuracy of the saved policy by `generate`, fp32, one prompt at a time."""
    import numpy as np
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from stoker.config import load as config_load
    from stoker.rl import rewards, tasks
    from stoker.rl.types import Sample, SamplingParams

    config = config_load.load(RUN_FILE, overrides)
    tokenizer = AutoTokenizer.from_pretrained(policy)
    model = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32).eval()
    suite = rewards.build(config.rewards)
    samples = []
    for prompt in tasks.load(config, tokenizer).validation["holdout"]:
        ids = torch.tensor([prompt.token_ids])
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=config.sampling.max_new_tokens,
            pad_token_id=tokenizer.pad_token_id or tokenizer.eos_token_id,
        )[0, ids.shape[1] :]
        stopped = int(output[-1]) == tokenizer.eos_token_id
        text = tokenizer.decode(output, skip_special_tokens=True)
        none = np.zeros(len(output), dtype=np.float32)
        samples.append(
            Sample(
                prompt,
                0,
                SamplingParams(),
                0,
                output.numpy().astype(np.int32),
                none,
                text,
                "stop" if stopped else "length",
            )
        )
    try:
        return sum(suite.solved(one) for one in suite(samples, 0)) / len(samples)
    finally:
        suite.close()


def by_stoker(policy: Path, overrides: list[str]) -> float:
    from stoker.config import load as config_load
    from stoker.evaluating import evaluate_model

    config = config_load.load(RUN_FILE, [*overrides, "model.dtype=float32"])
    return evaluate_model(str(policy), config, 1)["holdout"]["accuracy"]


def one(seed: int, runs: Path, steps: list[str]) -> dict[str, Any]:
    overrides = [f"seed={seed}", f"name=seed-{seed}", f"runs_dir={runs}", *steps]
    started = time.monotonic()
    done = stoker_train(RUN_FILE, overrides)
    if done.returncode:
        raise SystemExit(f"seed {seed} failed:\n{done.stdout}{done.stderr}")
    minutes = (time.monotonic() - started) / 60
    folder = runs / f"seed-{seed}"
    last = max(int(path.name.removeprefix("step_")) for path in folder.glob("checkpoints/step_*"))
    first, final = answers(folder, 0), answers(folder, last)
    parsed = [key for key, record in first.items() if record["parsed"]]
    policy = folder / "checkpoints" / f"step_{last}" / "policy"
    result = {
        "seed": seed,
        "minutes": minutes,
        "start": shares(first),
        "end": shares(final),
        "gain": shares(final)["right"] - shares(first)["right"],
        "parsed_at_start": len(parsed),
        "gain_where_parsed": sum(final[key]["reward"] == 1.0 for key in parsed) / len(parsed)
        - sum(first[key]["reward"] == 1.0 for key in parsed) / len(parsed),
        "fp32_stoker": by_stoker(policy, overrides),
        "fp32_transformers": by_transformers(policy, overrides),
    }
    print(result, flush=True)
    return result


def main() -> None:
    args = arguments(__doc__ or "")
    runs = workspace("smollm2")
    seeds, steps = ([0], ["stop.steps=15"]) if args.quick else ([0, 1], [])
    finish({"seeds": [one(seed, runs, steps) for seed in seeds]})


if __name__ == "__main__":
    main()
