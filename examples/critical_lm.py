"""The critical batch of a small language model: bytes of Python's language reference (it comes with Python).

Three roads beside one another: branches of one state, updates to one held-out loss, and the noise of the gradient.

python examples/critical_lm.py              about ten minutes on one thread
python examples/critical_lm.py --quick      seconds, of a model too small to mean much
python examples/critical_lm.py --html critical.html --json critical.json
"""

import argparse
import json
import sys
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from pydoc_data.topics import topics

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from stoker.batch import LoaderOptions, Target
from stoker.batch.critical.measured import Critical
from stoker.batch.critical.measuring import critical_batch
from stoker.batch.trainings.setting import Setting
from stoker.batch.trainings.training import Plan
from stoker.report.critical import sections
from stoker.report.html import page, save

WINDOW = 64
"""Bytes of one example."""
HELD_OUT = 192
"""Windows, evenly over the text."""


def windows() -> tuple[Tensor, Tensor]:
    """For training and held out, (n, WINDOW) each."""
    text = "\n\n".join(topics[name] for name in sorted(topics)).encode()
    every = torch.tensor(list(text[: len(text) - len(text) % WINDOW])).view(-1, WINDOW)
    held_out = torch.zeros(len(every), dtype=torch.bool)
    held_out[:: len(every) // HELD_OUT] = True
    return every[~held_out], every[held_out]


def loss(model: nn.Module, ids: Tensor) -> Tensor:
    """Negative log-likelihood of each next byte."""
    logits = model(input_ids=ids, use_cache=False).logits  # (B, T, 256)
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def make_target(layers: str = "2", hidden: str = "64") -> Target:
    """Two layers of width 64, AdamW."""
    train, held_out = windows()

    def load(size: int, options: LoaderOptions) -> Iterable[Tensor]:
        return DataLoader(train, size, shuffle=True, drop_last=True, collate_fn=torch.stack, **options.keywords())

    config = LlamaConfig(
        vocab_size=256,
        hidden_size=int(hidden),
        intermediate_size=3 * int(hidden),
        num_hidden_layers=int(layers),
        num_attention_heads=4,
        num_key_value_heads=2,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    return Target(
        model,
        optimizer,
        lambda size: train[:size],
        loss,
        unit="windows",
        most=len(train),
        load=load,
        validate=lambda model: float(loss(model, held_out)),
    )


def measure(*, quick: bool = False) -> Critical:
    """From 4 windows an update on."""

    def tell(said: str, left: float | None) -> None:
        print(f"{said}; about {left or 0:.0f} s left of this road", file=sys.stderr)

    if quick:
        small = partial(make_target, "1", "16")
        plan = Plan(256, evaluations=1)
        return critical_batch(small, Setting(8), plan, before=128, multiples=(1, 4), orders=2, loss=5.0, seeds=1)
    base = Setting(4, warmup_samples=256)
    return critical_batch(make_target, base, Plan(2048, evaluations=4), before=2048, loss=2.4, seeds=2, tell=tell)


def main() -> None:
    """Prints what was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--html", type=Path)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    found = measure(quick=given.quick)
    print(found)
    if given.json:
        given.json.write_text(json.dumps(found.to_json()))
    if given.html:
        save(given.html, page("Critical batch", "a small language model", list(sections(found.to_json())), str(found)))


if __name__ == "__main__":
    main()
