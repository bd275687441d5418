"""LoRA beside full fine-tuning of SmolLM2-135M-Instruct: peak memory of a run, and what the example's run learns.

Memory: the same two steps (8 samples a prompt, no leash, fp32, AdamW) in processes of their own, one training all
weights, one adapters of rank 16 on every linear map; the peak is that of the process. Adapters save weights' gradients
and optimizer states, not activations, so the ratio hangs on the micro-batch: measured at 512 tokens, and at the
example's 4096. Learning: the example's run with adapters at ten times its learning rate, held-out greedy accuracy
before and after. `--quick`: 512 tokens and fewer prompts alone.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from bench.common import ROOT, finish, workspace
from stoker.record.memory import peak_resident_bytes

MODEL = ROOT / "models" / "smollm2-135m-instruct"
RUN_FILE = ROOT / "examples" / "smollm2_arithmetic.toml"
RANK = 16
LORA = (f"lora.rank={RANK}", "optimizer.learning_rate=3e-4")
SIDES = {"full": (), "lora": LORA, "lora_merged": (*LORA, "lora.checkpoint=merged")}


def run(side: str, model: Path, steps: int, overrides: list[str]) -> dict[str, Any]:
    """One run in this process."""
    from stoker.config import load as config_load
    from stoker.record.read import Run
    from stoker.runner import train

    runs = workspace("lora")
    settings = [
        f"runs_dir={runs}",
        f"name={side}",
        f"model.path={model}",
        "model.dtype=float32",
        f"stop.steps={steps}",
        f"checkpoint.every_steps={steps}",
        *SIDES[side],
        *overrides,
    ]
    train(config_load.load(RUN_FILE, settings), mode="quiet")
    recorded = Run.load(runs / side)
    held_out = [value for _, value in recorded.series("eval/holdout/accuracy")]
    return {
        "peak": peak_resident_bytes(),
        "seconds": [record["time/step"] for record in recorded.metrics if record["step"] > 0],
        "held_out": held_out,
        "policy_bytes": sum(f.stat().st_size for f in (runs / side).glob("checkpoints/step_*/policy/*.safetensors")),
    }


def in_process(side: str, model: Path, steps: int, *overrides: str) -> dict[str, Any]:
    """`run` in a process of its own, whose peak is the run's."""
    command = [sys.executable, "-m", "bench.lora", "--side", side, "--steps", str(steps), "--model", str(model)]
    done = subprocess.run([*command, *overrides], cwd=ROOT, capture_output=True, text=True, timeout=7200, check=False)
    if done.returncode:
        raise SystemExit(f"{side} failed:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    size = f"peak {found['peak'] / 2**30:.2f} GiB, policy {found['policy_bytes'] / 2**20:.0f} MiB"
    print(f"{side} {' '.join(overrides)}: {size}", flush=True)
    return found


def memory(model: Path, *overrides: str) -> dict[str, Any]:
    """Peaks of each side and their ratio to the full one's."""
    unjudged = ("validation.holdout=0", "validation.sets=[]", "validation.every_samples=0")
    found = {side: in_process(side, model, 2, *unjudged, *overrides) for side in SIDES}
    peaks = {side: one["peak"] for side, one in found.items()}
    return {
        "ratio": peaks["lora"] / peaks["full"],
        "ratio_merged": peaks["lora_merged"] / peaks["full"],
        "peaks": peaks,
        "seconds": {side: one["seconds"] for side, one in found.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="memory alone, at one size")
    parser.add_argument("--model", type=Path, default=MODEL, help="folder of the model (see `make smollm2`)")
    parser.add_argument("--side", choices=tuple(SIDES), help=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("overrides", nargs="*", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if not args.model.is_dir():
        raise SystemExit(f"{args.model} is missing: `make smollm2` makes it")
    if args.side:
        print(json.dumps(run(args.side, args.model, args.steps, args.overrides)))
        return
    small = memory(args.model, "update.tokens_per_microbatch=512", *(["sampling.prompts_per_step=4"] * args.quick))
    result: dict[str, Any] = {"peak_memory_ratio": small["ratio"], "tokens_512": small}
    if not args.quick:
        result["tokens_4096"] = memory(args.model)
        held_out = in_process("lora", args.model, 40)["held_out"]
        result |= {"start": held_out[0], "end": held_out[-1], "gain": held_out[-1] - held_out[0]}
    finish(result)


if __name__ == "__main__":
    main()
