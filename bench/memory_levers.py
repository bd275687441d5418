"""What each lever of the ladder saves, predicted and measured: `python -m bench.memory --levers`.

Two small models, each with no lever pulled (fp32, AdamW in a loop, eager attention) and with one pulled alone, train
for two complete steps in a process of its own. Measured is the growth of its peak resident memory (`bench.memory`),
with MALLOC_MMAP_THRESHOLD_ at 1 MiB, so that holes in glibc's heap don't hide what a lever does. Predicted is what
`stoker.memory.levers` promises; other optimizers and weights all in bf16, which the ladder doesn't propose, by
`predict`. Levers that need a GPU or a library that isn't here are listed with their prediction alone.
"""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from bench.growth import TINY, grown, in_a_process
from stoker.memory import ModelShape, Setup, levers, predict, shape_of

__all__ = ["BASE", "LEVERS", "MODELS", "Row", "measure", "predicted", "table"]

CHUNK = 1024
"""Tokens of chunked logits, as the ladder proposes them."""
LITTLE = 0.01
"""A saving of less of the whole is within what two processes differ by."""
MODELS: dict[str, dict[str, Any]] = {
    "llama": {
        "hidden_size": 320,
        "intermediate_size": 864,
        "num_hidden_layers": 4,
        "num_attention_heads": 5,
        "num_key_value_heads": 1,
        "vocab_size": 8000,
        "max_position_embeddings": 512,
    },
    "gpt2": {
        "n_embd": 320,
        "n_layer": 4,
        "n_head": 5,
        "vocab_size": 8000,
        "n_positions": 512,
        "bos_token_id": None,
        "eos_token_id": None,
        "attn_pdrop": 0.0,  # with dropout, SDPA on a CPU falls back to a path of its own
    },
}
BASE = Setup(
    examples=4, tokens=512, precision="fp32", optimizer="adamw", stepping="loop", attention="eager", device="cpu"
)
LEVERS: dict[str, dict[str, Any]] = {
    "mixed precision": {"precision": "autocast"},
    "freeing temporaries": {"stepping": "fused"},
    "flash attention": {"attention": "flash"},
    "chunked logits": {"logits_chunk": CHUNK},
    "half the input length": {"tokens": BASE.tokens // 2},
    "half the micro-batch": {"examples": BASE.examples // 2, "accumulating": True},
    "checkpointing": {"checkpointing": True},
    "adapters": {"lora_rank": 16, "precision": "bf16"},
    "all in bf16": {"precision": "bf16"},
    "SGD with momentum for AdamW": {"optimizer": "sgd_momentum"},
    "Adafactor for AdamW": {"optimizer": "adafactor"},
}
"""What each changes of the set-up; the names of the ladder where it has them."""


@dataclass(frozen=True)
class Row:
    """One lever at one model; bytes."""

    model: str
    lever: str
    predicted: float
    measured: float | None
    """None: it can't be pulled on a CPU."""
    whole: float
    """Measured with no lever pulled."""


def shape(model: str) -> ModelShape:
    return shape_of(_config(model, tiny=False).to_dict())


def predicted(of: ModelShape) -> dict[str, float]:
    """Bytes each lever is said to save, pulled alone: first those that are measured, then those that can't be."""
    ladder = {lever.name: lever.saves for lever in levers(of, BASE)}
    whole = predict(of, BASE).peak
    mine = {name: whole - predict(of, replace(BASE, **change)).peak for name, change in LEVERS.items()}
    return {name: ladder.get(name, saves) for name, saves in mine.items()} | {
        name: saves for name, saves in ladder.items() if name not in mine and saves
    }


def measure(
    models: Sequence[str], names: Sequence[str], growth: Callable[[str, Setup], int] | None = None
) -> list[Row]:
    """Each model with none of the levers and with each of those named alone, by `growth`: in a process of its own."""
    growth = growth or _in_a_process
    rows = []
    for model in models:
        expected = predicted(shape(model))
        whole = growth(model, BASE)
        for lever, saves in expected.items():
            found = None
            if lever in names:
                found = whole - growth(model, replace(BASE, **LEVERS[lever]))
            if lever in names or lever not in LEVERS:
                rows.append(Row(model, lever, saves, found, whole))
                print(_line(rows[-1]), flush=True)
    return rows


def table(rows: Sequence[Row]) -> str:
    """Markdown: levers down, models across; MiB saved, and how far off the prediction was where it is no trifle."""
    models = list(dict.fromkeys(row.model for row in rows))
    by: Mapping[tuple[str, str], Row] = {(row.lever, row.model): row for row in rows}
    head = "| lever | " + " | ".join(f"{model}: predicted | measured | off by" for model in models) + " |"
    lines = [head, "|---" * (1 + 3 * len(models)) + "|"]
    for lever in dict.fromkeys(row.lever for row in rows):
        cells = [cell for model in models for cell in _cells(by[lever, model])]
        lines.append(f"| {lever} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cells(row: Row) -> tuple[str, str, str]:
    found = "–" if row.measured is None else f"{row.measured / 2**20:,.0f}"
    told = row.measured is not None and row.measured > LITTLE * row.whole
    off = f"{row.predicted / row.measured - 1:+.0%}" if told and row.measured else "–"
    return f"{row.predicted / 2**20:,.0f}", found, off


def _line(row: Row) -> str:
    saves, found, off = _cells(row)
    return (
        f"{row.model}, {row.lever}: predicted to save {saves} MiB of {row.whole / 2**20:,.0f}, measured {found} ({off})"
    )


def _in_a_process(model: str, setup: Setup) -> int:
    words = model, json.dumps(asdict(setup))
    return int(in_a_process("bench.memory_levers", *words, mapped=True, seconds=600))


def _config(model: str, tiny: bool) -> Any:
    from transformers import AutoConfig

    sizes = MODELS[model]
    return AutoConfig.for_model(model, **sizes | {key: size for key, size in TINY.items() if tiny and key in sizes})


def _trained(model: str, setup: Setup, tiny: bool) -> Callable[[], None]:
    """A complete optimizer step of a model of random weights on random tokens."""
    import torch
    from transformers import AutoModelForCausalLM

    dtype = torch.bfloat16 if setup.precision == "bf16" else torch.float32
    attention = {"flash": "sdpa", "eager": "eager"}[setup.attention]
    made: Any = AutoModelForCausalLM.from_config(
        _config(model, tiny), dtype=dtype, attn_implementation=attention
    ).train()
    if setup.lora_rank:
        import peft

        made = peft.get_peft_model(made, peft.LoraConfig(r=setup.lora_rank, target_modules="all-linear"))
    if setup.checkpointing:
        made.activation_checkpointing_enable({"use_reentrant": False})
    weights = [weight for weight in made.parameters() if weight.requires_grad]
    optimizer = {
        "adamw": lambda: torch.optim.AdamW(weights, fused=setup.stepping == "fused"),
        "sgd_momentum": lambda: torch.optim.SGD(weights, 0.01, 0.9),
        "adafactor": lambda: torch.optim.Adafactor(weights),
    }[setup.optimizer]()
    loss = _chunked if setup.logits_chunk else _whole

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        for _ in range(2 if setup.accumulating else 1):
            ids = torch.randint(0, 64, (setup.examples, setup.tokens))
            with torch.autocast("cpu", torch.bfloat16, enabled=setup.precision == "autocast"):
                found = loss(made, ids)
            found.backward()
            del found
        optimizer.step()

    return step


def _whole(model: Any, ids: Any) -> Any:
    return model(input_ids=ids, labels=ids, use_cache=False).loss


def _chunked(model: Any, ids: Any) -> Any:
    """The mean over tokens with the logits of `CHUNK` of them at a time, computed again in the backward pass."""
    from torch.nn.functional import cross_entropy
    from torch.utils.checkpoint import checkpoint

    hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1].flatten(0, 1)
    labels, head = ids[:, 1:].flatten(), model.get_output_embeddings()

    def part(hidden: Any, labels: Any) -> Any:
        return cross_entropy(head(hidden).float(), labels, reduction="sum")

    parts = zip(hidden.split(CHUNK), labels.split(CHUNK), strict=True)
    return sum(checkpoint(part, *each, use_reentrant=False) for each in parts) / len(labels)


if __name__ == "__main__":
    name, asked = sys.argv[1], Setup(**json.loads(sys.argv[2]))
    few = replace(asked, tokens=8)
    print(grown(lambda: _trained(name, few, tiny=True)(), lambda: _trained(name, asked, tiny=False))[1])
