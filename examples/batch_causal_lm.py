"""A causal language model on real text: paragraphs of Python's language reference (it comes with Python), by bytes.

They differ in length, so a batch is padded, and the longest decide what fits.

stoker batch fit    examples/batch_causal_lm.py:make_target
stoker batch memory examples/batch_causal_lm.py:make_target
stoker batch prove  examples/batch_causal_lm.py:make_target --size 16
"""

from collections.abc import Iterable
from pydoc_data.topics import topics
from statistics import fmean

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from stoker.batch import LoaderOptions, Target

LONGEST = 1024
"""Bytes of a paragraph that are read."""
PAD = 0
"""No byte of the text is 0."""


def paragraphs() -> list[str]:
    """About 1,600 of them, longest first: a trial must see what training will see."""
    found = {part.strip() for text in topics.values() for part in text.split("\n\n")}
    return sorted((part for part in found if len(part) >= 40), key=lambda part: (-len(part), part))


def encode(texts: list[str], device: str) -> Tensor:
    """Bytes as ids, padded at the end: (B, longest)."""
    rows = [torch.tensor(list(text.encode())[:LONGEST]) for text in texts]
    return nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PAD).to(device)


def loss(model: nn.Module, ids: Tensor) -> Tensor:
    """Negative log-likelihood of each next byte, mean over the bytes that aren't padding."""
    logits = model(input_ids=ids, attention_mask=(ids != PAD).long(), use_cache=False).logits  # (B, T, 256)
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), ignore_index=PAD)


def make_target(layers: str = "2", hidden: str = "64") -> Target:
    """What stoker fits, sweeps and proves: model, optimizer, batches of any size, loss."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    every = paragraphs()
    held_out = every[7::10]  # a tenth of all lengths
    texts = [text for place, text in enumerate(every) if place % 10 != 7]

    def make_batch(size: int) -> Tensor:
        return encode(texts[:size], device)

    def load(size: int, options: LoaderOptions) -> Iterable[Tensor]:
        def collate(batch: list[str]) -> Tensor:
            return encode(batch, "cpu")

        return DataLoader(texts, size, shuffle=True, drop_last=True, collate_fn=collate, **options.keywords())

    def validate(model: nn.Module) -> float:
        return fmean(loss(model, encode(held_out[i : i + 16], device)).item() for i in range(0, len(held_out), 16))

    config = LlamaConfig(
        vocab_size=256,
        hidden_size=int(hidden),
        intermediate_size=3 * int(hidden),
        num_hidden_layers=int(layers),
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=PAD,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = LlamaForCausalLM(config).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    return Target(model, optimizer, make_batch, loss, most=len(texts), load=load, validate=validate)
