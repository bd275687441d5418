"""The models of `bench.fit`, and one trial of each at a size: also the process in which a size is judged.

`python -m bench.fit_models MODEL SIZE LIMIT STEPS`: exit status 0 where the steps ran under the limit.
"""

import sys

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.common import ROOT
from stoker.batch.limits import Meter, warm_up
from stoker.batch.out_of_memory import is_out_of_memory, may_be_out_of_memory
from stoker.batch.target import Maker, Target, Workload

__all__ = ["MODELS", "OUT_OF_MEMORY", "maker", "target"]

OUT_OF_MEMORY = 3
MAKER = f"{ROOT / 'bench' / 'fit_models.py'}:target"
RUN_FILE = ROOT / "examples" / "addition.toml"
RUN_OVERRIDES = ("sampling.prompts_per_step=32", "sampling.max_new_tokens=24")
VOCABULARY, TOKENS = 8000, 64


class Clicks(nn.Module):
    """Fields of a table looked up, then a small network: a click-through model."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(200_000, 16)
        self.top = nn.Sequential(
            nn.Linear(26 * 16, 1024), nn.ReLU(), nn.Linear(1024, 256), nn.ReLU(), nn.Linear(256, 1)
        )

    def forward(self, fields: Tensor) -> Tensor:
        """(B, 26) -> (B,)"""
        scores: Tensor = self.top(self.table(fields).flatten(1))
        return scores.squeeze(1)


class Encoder(nn.Module):
    """A transformer encoder that classifies."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.TransformerEncoder(nn.TransformerEncoderLayer(128, 4, 512, batch_first=True), 3)
        self.head = nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, 128) -> (B, 10)"""
        scores: Tensor = self.head(self.layers(x).mean(1))
        return scores


def _mlp() -> nn.Module:
    return nn.Sequential(*(layer for _ in range(16) for layer in (nn.Linear(256, 256), nn.GELU())), nn.Linear(256, 10))


def _conv() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10),
    )  # fmt: skip


def _causal() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=128,
            intermediate_size=384,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
        )
    )


def _classes(*shape: int) -> tuple[Tensor, Tensor]:
    return torch.randn(*shape), torch.randint(0, 10, shape[:1])


def _cross_entropy(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def _click_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.binary_cross_entropy_with_logits(model(batch[0]), batch[1])


def _causal_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    loss: Tensor = model(input_ids=tokens, labels=tokens).loss
    return loss


PARTS = {
    "mlp": (_mlp, lambda n: _classes(n, 256), _cross_entropy),
    "conv": (_conv, lambda n: _classes(n, 3, 32, 32), _cross_entropy),
    "encoder": (Encoder, lambda n: _classes(n, 128, 128), _cross_entropy),
    "causal": (_causal, lambda n: torch.randint(0, VOCABULARY, (n, TOKENS)), _causal_loss),
    "clicks": (Clicks, lambda n: (torch.randint(0, 200_000, (n, 26)), torch.rand(n)), _click_loss),
}
MODELS = {"clicks": 280, "mlp": 250, "conv": 350, "encoder": 400, "causal": 550, "run": 700}
"""MiB of each: well above what the model takes without examples, for steps of a second or so."""


def target(name: str) -> Target:
    """Same weights in every process."""
    torch.manual_seed(0)
    make, batch, loss = PARTS[name]
    model = make()
    return Target(model, torch.optim.AdamW(model.parameters()), batch, loss)


def maker(name: str) -> Maker:
    if name == "run":
        return Maker("stoker.engine.target:make", (str(RUN_FILE), *RUN_OVERRIDES))
    return Maker(MAKER, (name,))


def main() -> None:
    name, size, limit, steps = sys.argv[1], *map(int, sys.argv[2:5])
    warm_up()
    meter = Meter(fresh=True)
    workload: Workload = maker(name)()
    try:
        with meter.limited(workload.device, limit):
            for _ in range(steps):
                workload.step(size)
    except Exception as error:
        if is_out_of_memory(error) or may_be_out_of_memory(error):
            sys.exit(OUT_OF_MEMORY)
        raise


if __name__ == "__main__":
    main()
