"""Three samplers behind one call: stoker's, transformers' `generate`, and vLLM for CPU in its own environment.

`run(lengths)` draws one answer of each length, 8 for each prompt, and gives their tokens. Every engine may use all
cores. What can be chosen is chosen for the peer: see `Generate.SETTINGS` and `VLLM`.
"""

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from threading import Timer
from typing import Any, Protocol

import numpy as np
import torch

from bench.common import ROOT
from stoker.config.schema import Model
from stoker.engine.local.load import load_model, load_tokenizer
from stoker.engine.local.sampler import LocalSampler
from stoker.rl.types import Prompt, Request, SamplingParams

__all__ = ["MODEL", "PROMPTS", "SAMPLES", "Engine", "Generate", "Stoker", "Vllm", "load"]

MODEL = ROOT / "models" / "smollm2-135m-instruct"
PROMPTS, SAMPLES, PROMPT_TOKENS = 8, 8, 45
ANSWER_SECONDS = 1800

VLLM = """
import json, os, sys
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
from vllm import LLM, SamplingParams, TokensPrompt
model, dtype, prompts = json.loads(sys.stdin.readline())
engine = LLM(model=model, dtype=dtype, max_num_seqs=len(prompts), enable_prefix_caching=True, max_model_len=1024)
for line in sys.stdin:
    lengths = json.loads(line)
    params = [SamplingParams(temperature=1.0, max_tokens=n, min_tokens=n, ignore_eos=True, logprobs=0) for n in lengths]
    engine.reset_prefix_cache()  # in training each step has new weights
    found = engine.generate([TokensPrompt(prompt_token_ids=p) for p in prompts], params, use_tqdm=False)
    print(json.dumps([list(one.outputs[0].token_ids) for one in found]), file=answers, flush=True)
"""
"""Prompts as tokens, the log-prob of the drawn token alone, prefixes cached, no process between; its own prints
go to its log."""


class Engine(Protocol):
    """A sampler of 64 answers."""

    def run(self, lengths: Sequence[int]) -> list[list[int]]:
        """Answers at temperature 1, in order; answer n is to prompt n // SAMPLES."""
        ...


def load(dtype: str) -> tuple[Any, Any, list[list[int]]]:
    """The model, its tokenizer, and the prompts as tokens."""
    source = Model.model_validate({"path": str(MODEL), "dtype": dtype})
    random = np.random.default_rng(1)
    prompts = [random.integers(100, 40_000, PROMPT_TOKENS).tolist() for _ in range(PROMPTS)]
    return load_model(source, 0).eval(), load_tokenizer(source), prompts


class Stoker:
    """LocalSampler, as a run has it."""

    def __init__(self, model: Any, tokenizer: Any, prompts: Sequence[Sequence[int]]) -> None:
        self._sampler = LocalSampler(model, tokenizer, concurrent_samples=PROMPTS * SAMPLES)
        self._sampler._stop_ids = (-1,)  # no token ends an answer: the lengths are given
        self._prompts = [Prompt(f"bench:{n}", tuple(ids), "", None) for n, ids in enumerate(prompts)]

    def run(self, lengths: Sequence[int], temperature: float = 1.0) -> list[list[int]]:
        self._sampler.submit(
            [
                Request(self._prompts[n // SAMPLES], n % SAMPLES, SamplingParams(temperature, max_new_tokens=length), 0)
                for n, length in enumerate(lengths)
            ]
        )
        found = {sample.id: sample.token_ids.tolist() for sample in self._sampler.collect()}
        return [found[f"bench:{n // SAMPLES}/{n % SAMPLES}"] for n in range(len(lengths))]


class Generate:
    """transformers' `generate`: all rows run until the last has ended, as none can leave; the rest is cut off."""

    SETTINGS: tuple[dict[str, Any], ...] = (
        {},
        {"padded": True},  # a masked kernel, which on CPU is the faster one where heads share keys
        {"padded": True, "attention": "eager"},
    )

    def __init__(self, model: Any, prompts: Sequence[Sequence[int]]) -> None:
        self._model = model
        self._prompts = prompts
        self.setting = self.SETTINGS[0]

    def run(self, lengths: Sequence[int], temperature: float = 1.0) -> list[list[int]]:
        pad = int(self.setting.get("padded", False))
        ids = torch.tensor([[0] * pad + list(self._prompts[n // SAMPLES]) for n in range(len(lengths))])
        mask = torch.ones_like(ids)
        mask[:, :pad] = 0
        chosen = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
        longest = max(lengths)
        before = self._model.config._attn_implementation
        self._model.set_attn_implementation(self.setting.get("attention", before))
        with torch.no_grad():
            out = self._model.generate(
                ids,
                attention_mask=mask,
                min_new_tokens=longest,
                max_new_tokens=longest,
                eos_token_id=None,
                pad_token_id=0,
                **chosen,
            )
        self._model.set_attn_implementation(before)
        answers = out[:, ids.shape[1] :].tolist()
        return [answer[:length] for answer, length in zip(answers, lengths, strict=True)]


class Vllm:
    """vLLM for CPU, kept running in a process of its own."""

    def __init__(self, python: Path, log: Path, dtype: str, prompts: Sequence[Sequence[int]]) -> None:
        """`python`: the interpreter of its environment (`make vllm`). It starts with the first `run`."""
        cores = os.cpu_count() or 1
        openmp = python.parent.parent / "lib" / "libiomp5.so"  # vLLM asks for it; it comes with its package
        environment = {
            **os.environ,
            **({"LD_PRELOAD": str(openmp)} if openmp.exists() else {}),
            "OMP_NUM_THREADS": str(cores),
            "VLLM_CPU_OMP_THREADS_BIND": f"0-{cores - 1}",
            "VLLM_CPU_KVCACHE_SPACE": "2",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "HF_HUB_OFFLINE": "1",
        }
        self._log = log
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                [str(python), "-c", VLLM],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=environment,
            )
        self._send([str(MODEL), dtype, [prompts[n // SAMPLES] for n in range(PROMPTS * SAMPLES)]])

    def run(self, lengths: Sequence[int]) -> list[list[int]]:
        assert self._process.stdout is not None
        self._send(list(lengths))
        deadline = Timer(ANSWER_SECONDS, self._process.kill)
        deadline.start()
        line = self._process.stdout.readline()
        deadline.cancel()
        if not line:
            raise SystemExit(f"vLLM ended without an answer:\n{self._log.read_text()[-3000:]}")
        found: list[list[int]] = json.loads(line)
        return found

    def close(self) -> None:
        self._process.kill()
        self._process.wait(timeout=60)

    def _send(self, message: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(message) + "\n")
        self._process.stdin.flush()
