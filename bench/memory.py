"""How much a training process grows, predicted by arithmetic and measured.

Each set-up trains for two complete steps in a process of its own: 4 architectures, AdamW (a loop, fused), SGD with and
without momentum, checkpointing, fp32, autocast and pure bf16, 2 to 6 GiB each. Measured is the process's peak of
resident memory (what the kernel counts) over its resident memory after imports and a step of a tiny model of the same
kind; that holds the kernels' scratch and the holes in glibc's heap, which no formula knows. For those a margin,
`fixed + (1 + share) x predicted` with a further share under checkpointing, is fitted on the other three architectures,
never on the one it is judged on.

glibc keeps tensors below 32 MiB in one heap, and holes in it are memory that nobody has. `--mapped` sets
MALLOC_MMAP_THRESHOLD_ to 1 MiB in the processes, so that larger tensors are mapped and given back one by one: the
difference is what the holes take. `--quick`: two set-ups, small, no margin; its figures say nothing. `--levers` is
another bench: what each lever saves (`bench.memory_levers`), a few minutes on one thread.
"""

import argparse
import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np

from bench import memory_levers
from bench.common import finish
from bench.growth import TINY, grown, in_a_process
from stoker.memory import Breakdown, Setup, predict, shape_of
from stoker.memory.breakdown import Margin

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {
        "hidden_size": 512,
        "intermediate_size": 1408,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "vocab_size": 32000,
        "max_position_embeddings": 2048,
    },
    "qwen3": {
        "hidden_size": 640,
        "intermediate_size": 1792,
        "num_hidden_layers": 10,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "vocab_size": 60000,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
    },
    "gpt2": {
        "n_embd": 640,
        "n_layer": 8,
        "n_head": 10,
        "vocab_size": 50257,
        "n_positions": 1024,
        "attn_pdrop": 0.0,  # with dropout, SDPA on a CPU falls back to a path of its own
        "tie_word_embeddings": True,
    },
    "bert": {
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 8,
        "num_attention_heads": 12,
        "vocab_size": 30522,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
    },
}
ATTENTION = {"bert": "eager"}


@dataclass(frozen=True)
class Case:
    """One set-up."""

    architecture: str
    precision: str
    optimizer: str
    stepping: str
    checkpointing: bool
    examples: int
    tokens: int
    vocabulary: int = 0
    """0: the architecture's own."""
    layers: int = 0
    """0: the architecture's own; more where states are to be most of the memory."""

    @property
    def setup(self) -> Setup:
        attention = ATTENTION.get(self.architecture, "flash")
        return Setup(
            examples=self.examples,
            tokens=self.tokens,
            precision=self.precision,
            optimizer=self.optimizer,
            stepping=self.stepping,  # type: ignore[arg-type]
            checkpointing=self.checkpointing,
            attention=attention,  # type: ignore[arg-type]
            loss="cross_entropy, own precision" if self.architecture == "bert" else "cross_entropy",
            device="cpu",
        )

    def config(self, tiny: bool = False) -> Any:
        from transformers import AutoConfig

        sizes = ARCHITECTURES[self.architecture]
        more = {"vocab_size": self.vocabulary, "num_hidden_layers": self.layers, "n_layer": self.layers}
        for changes in (more, TINY if tiny else {}):
            sizes = sizes | {key: value for key, value in changes.items() if value and key in sizes}
        return AutoConfig.for_model(self.architecture, **sizes)

    def predicted(self) -> Breakdown:
        return predict(shape_of(self.config().to_dict()), self.setup)


def cases() -> list[Case]:
    """The peak is at the loss, at the beginning and at the end of the backward pass, and in the optimizer's step."""
    return [
        Case("llama", "fp32", "adamw", "loop", False, 8, 512),
        Case("llama", "autocast", "adamw", "fused", False, 20, 512, vocabulary=4096),
        Case("llama", "fp32", "adamw", "loop", True, 2, 512, layers=40),
        Case("llama", "bf16", "sgd_momentum", "loop", False, 12, 512),
        Case("qwen3", "fp32", "adamw", "loop", False, 4, 512),
        Case("qwen3", "autocast", "adamw", "fused", False, 12, 512, vocabulary=4096),
        Case("qwen3", "fp32", "sgd_momentum", "loop", True, 4, 512, layers=32),
        Case("qwen3", "bf16", "sgd", "loop", False, 6, 512),
        Case("gpt2", "fp32", "adamw", "loop", False, 4, 512),
        Case("gpt2", "autocast", "adamw", "fused", False, 10, 512, vocabulary=4096),
        Case("gpt2", "fp32", "adamw", "loop", True, 2, 512, layers=28),
        Case("gpt2", "bf16", "sgd", "loop", False, 8, 512),
        Case("bert", "fp32", "adamw", "loop", False, 8, 256),
        Case("bert", "autocast", "adamw", "fused", False, 12, 256, vocabulary=4096),
        Case("bert", "fp32", "sgd_momentum", "loop", True, 4, 256, layers=24),
        Case("bert", "bf16", "sgd_momentum", "loop", False, 16, 256),
    ]


def quick() -> list[Case]:
    return [
        Case("llama", "fp32", "adamw", "loop", False, 1, 64),
        Case("gpt2", "bf16", "sgd", "loop", True, 1, 64),
    ]


def target(case: Case, tiny: bool = False) -> Any:
    """What trains: a model of random weights, and a batch of random tokens."""
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForMaskedLM

    from stoker.batch.target import Target

    config = case.config(tiny)
    maker = AutoModelForMaskedLM if case.architecture == "bert" else AutoModelForCausalLM
    dtype = torch.bfloat16 if case.precision == "bf16" else torch.float32
    implementation = {"flash": "sdpa", "eager": "eager"}[case.setup.attention]
    model = maker.from_config(config, dtype=dtype, attn_implementation=implementation).train()
    if case.checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})
    fused = case.stepping == "fused"
    optimizer = {
        "adamw": lambda: torch.optim.AdamW(model.parameters(), fused=fused),
        "sgd": lambda: torch.optim.SGD(model.parameters(), 0.01, fused=fused),
        "sgd_momentum": lambda: torch.optim.SGD(model.parameters(), 0.01, 0.9, fused=fused),
    }[case.optimizer]()

    cached = {} if case.architecture == "bert" else {"use_cache": False}

    def loss(model: Any, ids: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16, enabled=case.precision == "autocast"):
            return model(input_ids=ids, labels=ids, **cached).loss

    return Target(model, optimizer, lambda size: torch.randint(0, 64, (size, case.tokens)), loss)


def grow(case: Case) -> dict[str, float]:
    """Two steps in this process: bytes of its growth."""
    baseline, growth = grown(lambda: target(case, tiny=True).step(2), lambda: partial(target(case).step, case.examples))
    return {"baseline": baseline, "growth": growth}


def measured(case: Case, mapped: bool) -> dict[str, Any]:
    words = "--case", json.dumps(asdict(case))
    found = json.loads(in_a_process("bench.memory", *words, mapped=mapped, seconds=1200))
    predicted = case.predicted()
    row = {**asdict(case), **found, "predicted": predicted.peak, "moment": predicted.moment}
    print(
        f"{case.architecture} {case.precision} {case.optimizer} ({case.stepping})"
        f"{' checkpointing' if case.checkpointing else ''}: predicted {predicted.peak / 2**30:.3f} GiB "
        f"({predicted.moment}), measured {found['growth'] / 2**30:.3f}",
        flush=True,
    )
    return row


def fitted(rows: Sequence[dict[str, Any]]) -> Margin:
    """The margin that makes the relative errors least, in squares."""
    growth = np.array([row["growth"] for row in rows])
    predicted = np.array([row["predicted"] for row in rows])
    checkpointing = np.array([float(row["checkpointing"]) for row in rows])
    columns = np.stack([predicted, np.full(len(rows), 2.0**30), predicted * checkpointing]) / growth
    factor, gib, further = np.linalg.lstsq(columns.T, np.ones(len(rows)), rcond=None)[0]
    return Margin(float(factor - 1), float(gib * 2**30), float(further))


def judged(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each row with the error of its prediction, its margin fitted without its architecture."""
    found = []
    for row in rows:
        margin = fitted([other for other in rows if other["architecture"] != row["architecture"]])
        margin = margin.resolved(row["checkpointing"])
        expected = row["predicted"] * (1 + margin.share) + margin.fixed
        errors = {"error": expected / row["growth"] - 1, "error_without_margin": row["predicted"] / row["growth"] - 1}
        found.append({**row, "expected": expected, **errors})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two small set-ups, no margin")
    parser.add_argument("--mapped", action="store_true", help="without the holes of glibc's heap")
    parser.add_argument("--levers", action="store_true", help="what each lever saves, predicted and measured")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.case:
        print(json.dumps(grow(Case(**json.loads(args.case)))))
        return
    if args.levers:
        found = memory_levers.measure(
            list(memory_levers.MODELS), list(memory_levers.LEVERS)[: 2 if args.quick else None]
        )
        print(memory_levers.table(found))
        finish({"levers": [asdict(row) for row in found]})
        return
    rows = [measured(case, args.mapped) for case in (quick() if args.quick else cases())]
    if args.quick:
        errors = [abs(row["predicted"] / row["growth"] - 1) for row in rows]
    else:
        rows = judged(rows)
        errors = [abs(row["error"]) for row in rows]
        print(f"margin of all rows: {fitted(rows)}")
    finish({"cases": rows, "median_error": statistics.median(errors), "worst_error": max(errors)})


if __name__ == "__main__":
    main()
