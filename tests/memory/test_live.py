"""The predicted peak against the bytes that are alive in real steps, storage by storage."""

import weakref
from typing import Any

import pytest
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bench.memory import Case, target


class Alive(TorchDispatchMode):
    """The most bytes that were alive after any operation; what one allocates and frees within isn't seen."""

    def __init__(self, present: list[Tensor]) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.sizes: dict[int, int] = {}
        for tensor in present:
            self.see(tensor)

    def see(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = id(storage)  # one object a storage, as long as it lives
        if key in self.sizes:
            return
        self.sizes[key] = storage.nbytes()
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self.gone, key)

    def gone(self, key: int) -> None:
        self.now -= self.sizes.pop(key)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(found):
            if isinstance(leaf, Tensor):
                self.see(leaf)
        return found


SMALL: dict[str, dict[str, Any]] = {
    "llama": {
        "hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 256, "vocab_size": 4000,
    },
    "gpt2": {"n_embd": 160, "n_layer": 4, "n_head": 5, "n_positions": 256, "attn_pdrop": 0.0, "vocab_size": 4000},
    "bert": {
        "hidden_size": 192, "intermediate_size": 768, "num_hidden_layers": 4, "num_attention_heads": 6,
        "max_position_embeddings": 256, "vocab_size": 4000,
    },
}  # fmt: skip
CASES = [
    Case("llama", "fp32", "adamw", "loop", False, 2, 128),
    Case("llama", "autocast", "adamw", "fused", False, 4, 128, vocabulary=500),
    Case("llama", "fp32", "adamw", "loop", True, 1, 64, layers=12, vocabulary=500),
    Case("llama", "bf16", "sgd_momentum", "loop", False, 4, 128),
    Case("gpt2", "fp32", "sgd_momentum", "loop", True, 2, 128),
    Case("gpt2", "bf16", "sgd", "loop", False, 2, 128),
    Case("bert", "fp32", "adamw", "loop", False, 2, 128),
    Case("bert", "autocast", "sgd_momentum", "loop", True, 2, 128, vocabulary=500),
]


@pytest.mark.filterwarnings("ignore")  # transformers, about token ids beyond a small vocabulary
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.architecture}-{case.precision}-{case.optimizer}")
def test_the_peak_is_what_is_alive(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.memory.ARCHITECTURES", SMALL)
    trained = target(case)
    trained.step(case.examples)
    trained.optimizer.zero_grad(set_to_none=True)
    states = [value for state in trained.optimizer.state.values() for value in state.values()]
    alive = Alive([*trained.model.parameters(), *states])
    with alive:
        trained.step(case.examples)
    # Under autocast and checkpointing the prediction is known to be high: a small model's first layer weighs much.
    within = 0.09 if case.checkpointing and case.precision == "autocast" else 0.04
    assert case.predicted().peak == pytest.approx(alive.peak, rel=within)
