"""One step, phase by phase: what it costs, how far from the machine's limits, and how that grows.

SmolLM2-135M, 8 prompts x 8 samples, 45-token prompts, 64 new tokens. The limits are measured first: the fastest square
matrix product and a plain copy. Sampling is held against max(FLOPs / peak, bytes / bandwidth) of every decode step,
the passes of the learner against the peak. The algorithmic work counts, each prompt once; what was executed stands
beside it, from the shapes in a trace. Growth is fitted on models with random weights: cost ~ x ^ exponent. Where
`executed` falls short of `algorithmic`, compiled or replayed kernels hid their shapes.
"""

import argparse
import os
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from bench.common import ROOT, finish
from bench.engine import Engine, random_model, rows_of, timed
from bench.roofline import Answer, Limits, Sequences, cache_elements, exponent
from stoker.batch.speed import copy_bandwidth, matmul_peak, matmul_rate
from stoker.config import schema
from stoker.engine.counting import model_work, rows_flops, samples_flops
from stoker.engine.local.dtype import fastest_dtype
from stoker.engine.local.load import load_model, pick_device
from stoker.engine.operators import executed_flops
from stoker.engine.profiling import events_of, torch_profiler
from stoker.rl.types import Sample

MODEL = ROOT / "models" / "smollm2-135m-instruct"
SIZES = {"prompts": 8, "samples": 8, "prompt_tokens": 45, "new_tokens": 64}
QUICK = {"prompts": 2, "samples": 4, "prompt_tokens": 12, "new_tokens": 8}
GROWTH = {"hidden_size": 256, "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 2}
GROWTH_SIZES = {"prompts": 8, "samples": 4, "prompt_tokens": 16, "new_tokens": 32}
MODELS = ((128, 4), (192, 6), (256, 8), (384, 10))
"""Hidden size and layers, from 0.9 to 20 million weights beside the tables."""
QUICK_MODELS = ((32, 2), (64, 2), (96, 3))


def phases(engine: Engine, sizes: Mapping[str, int], repeats: int) -> tuple[dict[str, float], list[Sample]]:
    """Seconds of each phase, the first call left out, and what was drawn."""
    device = engine.model.device
    draw = partial(engine.draw, **sizes)
    rows = rows_of(draw())
    sample, samples = timed(draw, device, repeats)
    score = partial(engine.learner.score, rows, "policy")
    score()
    engine.update(rows)
    seconds = {"sample": sample, "score": timed(score, device, repeats)[0]}
    return {**seconds, "update": timed(lambda: engine.update(rows), device, repeats)[0]}, samples


def executed(engine: Engine, sizes: Mapping[str, int]) -> dict[str, int]:
    """FLOPs of one call of each phase, from a trace; not timed."""
    rows = rows_of(engine.draw(**sizes))
    calls = {
        "sample": partial(engine.draw, **sizes),
        "score": partial(engine.learner.score, rows, "policy"),
        "update": partial(engine.update, rows),
    }
    found = {}
    for name, call in calls.items():
        trace = torch_profiler()
        with trace:
            call()
        found[name] = sum(executed_flops(events_of(trace)).values())
    return found


def limits(device: torch.device, dtype: torch.dtype, quick: bool) -> Limits:
    budget = 0.1 if quick else 1.0
    return Limits(matmul_peak(device, dtype, budget), copy_bandwidth(device, budget))


def distances(engine: Engine, sizes: Mapping[str, int], found: Limits, repeats: int) -> dict[str, Any]:
    """By phase: seconds, work, and the share of the limit."""
    seconds, samples = phases(engine, sizes, repeats)
    work, rows, done = model_work(engine.model), rows_of(samples), executed(engine, sizes)
    answers = [Answer(s.prompt.id, len(s.prompt.token_ids), len(s.token_ids)) for s in samples]
    text = engine.model.config.get_text_config()
    sequences = Sequences(answers, work, engine.model.dtype.itemsize, cache_elements(text))
    flops = {
        "sample": samples_flops(samples, work),
        "score": rows_flops(rows, work, training=False),
        "update": rows_flops(rows, work, training=True),
    }
    drawn = sum(answer.tokens for answer in answers)
    return {
        name: {
            "seconds": round(spent, 4),
            "answer_tokens_per_s": round(drawn / spent, 1),
            "algorithmic_gflop": round(flops[name] / 1e9, 2),
            "executed_gflop": round(done[name] / 1e9, 2),
            "share_of_peak": round(flops[name] / spent / found.flops, 4),
            "executed_share_of_peak": round(done[name] / spent / found.flops, 4),
            **({"share_of_roofline": round(sequences.seconds(found) / spent, 4)} if name == "sample" else {}),
        }
        for name, spent in seconds.items()
    }


def by_shape(engine: Engine, sizes: Mapping[str, int], quick: bool) -> dict[str, float]:
    """GFLOP/s of the model's own products: a decode step's, and a micro-batch's."""
    text = engine.model.config.get_text_config()
    rows = {"decode": sizes["prompts"] * sizes["samples"], "update": 256 if quick else 4096}
    products = {
        "into the MLP": (text.hidden_size, text.intermediate_size),
        "out of the MLP": (text.intermediate_size, text.hidden_size),
        "head": (text.hidden_size, text.vocab_size),
    }
    device, dtype, budget = engine.model.device, engine.model.dtype, 0.05 if quick else 0.3
    return {
        f"{phase} {name} {m}x{k}x{n}": round(matmul_rate(m, k, n, device, dtype, budget) / 1e9, 2)
        for phase, count in rows.items()
        for name, (k, n) in products.items()
        for m in [min(count, 1024) if name == "head" else count]
    }


def growth(device: torch.device, dtype: str, quick: bool) -> dict[str, Any]:
    """Exponents of each phase's seconds over samples, new tokens and the model's weights."""
    base = QUICK if quick else GROWTH_SIZES
    shape = {**GROWTH, **({"hidden_size": 64, "num_hidden_layers": 2} if quick else {})}
    doublings = (1, 2, 4) if quick else (1, 2, 4, 8)

    def cost(sizes: Mapping[str, int], **more: int) -> tuple[dict[str, float], int]:
        merged = {**shape, **more}
        merged["intermediate_size"] = 3 * merged["hidden_size"]
        model = random_model("llama", device, dtype, vocab_size=4096, max_position_embeddings=2048, **merged)
        weights = model_work(model)
        engine = Engine.of(model, concurrent_samples=1024)
        return phases(engine, sizes, 1 if quick else 3)[0], weights.linear + weights.head

    axes: dict[str, list[tuple[float, dict[str, float]]]] = {
        "samples": [(base["samples"] * k, cost({**base, "samples": base["samples"] * k})[0]) for k in doublings],
        "new_tokens": [
            (base["new_tokens"] * k, cost({**base, "new_tokens": base["new_tokens"] * k})[0]) for k in doublings
        ],
        "weights": [],
    }
    for hidden, layers in QUICK_MODELS if quick else MODELS:
        seconds, weights = cost(base, hidden_size=hidden, num_hidden_layers=layers)
        axes["weights"].append((weights, seconds))
    return {
        axis: {phase: exponent([(x, seconds[phase]) for x, seconds in points]) for phase in points[0][1]}
        for axis, points in axes.items()
    }


def load_engine(device: torch.device, dtype: str, quick: bool) -> Engine:
    if quick and not MODEL.is_dir():
        sizes = {**GROWTH, "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2, "vocab_size": 4096}
        return Engine.of(random_model("llama", device, dtype, **sizes))
    if not MODEL.is_dir():
        raise SystemExit(f"{MODEL} is missing: `make smollm2` makes it")
    return Engine.of(load_model(schema.Model(path=str(MODEL), dtype=dtype, device=str(device)), seed=0))  # type: ignore[arg-type]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the same, with sizes that say nothing about speed")
    parser.add_argument(
        "--limit", action="store_true", help="also the machine's limits, and how far from them a step is"
    )
    args = parser.parse_args()
    device = pick_device("auto")
    dtype = fastest_dtype(device)
    sizes, repeats = (QUICK, 1) if args.quick else (SIZES, 3)
    engine = load_engine(device, dtype, args.quick)
    result: dict[str, Any] = {
        "device": str(device),
        "dtype": dtype,
        "threads": torch.get_num_threads(),
        "load": os.getloadavg()[0],
        "sizes": sizes,
    }
    if args.limit:
        found = limits(device, engine.model.dtype, args.quick)
        result |= {"peak_gflops": round(found.flops / 1e9, 2), "bandwidth_gb": round(found.bandwidth / 1e9, 2)}
        result["gflops_by_shape"] = by_shape(engine, sizes, args.quick)
        print(result, flush=True)
        result["phases"] = distances(engine, sizes, found, repeats)
        result["sampling_share_of_roofline"] = result["phases"]["sample"]["share_of_roofline"]
        result["update_share_of_peak"] = result["phases"]["update"]["share_of_peak"]
    else:
        result["seconds"] = phases(engine, sizes, repeats)[0]
    print(result, flush=True)
    finish({**result, "exponents": growth(device, dtype, args.quick)})


if __name__ == "__main__":
    main()
