"""What the KL leash ties the policy to: another model, a frozen copy of the policy, or the policy's own base."""

import copy
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from stoker.config.schema import RunConfig
from stoker.engine.local import saving
from stoker.engine.local.forward import ScoringModel
from stoker.engine.local.load import cast_weights, load_other
from stoker.errors import CheckpointError, ModelError

if TYPE_CHECKING:
    from stoker.engine.local.adapters import Adapters

__all__ = ["Reference", "initial_policy", "named_reference"]


class Reference(Protocol):
    """Scores as the reference does."""

    def scoring(self) -> AbstractContextManager[ScoringModel]:
        """The model to score with; the reference only inside the context."""
        ...

    def tensors(self) -> Mapping[str, Tensor]:
        """What a resume needs: the initial policy can't be told from later checkpoints."""
        ...

    def restore(self, tensors: Mapping[str, Tensor], source: Path) -> None:
        """Inverse of `tensors`. Raises CheckpointError where they are of another model."""
        ...


class SecondModel:
    """A model of its own, which nothing trains."""

    def __init__(self, model: PreTrainedModel, config: RunConfig) -> None:
        self.model = model.requires_grad_(False).eval()
        self._scoring = ScoringModel(model, config.update.logits_per_chunk)

    @contextmanager
    def scoring(self) -> Iterator[ScoringModel]:
        yield self._scoring

    def tensors(self) -> Mapping[str, Tensor]:
        return saving.tensors_of(self.model)

    def restore(self, tensors: Mapping[str, Tensor], source: Path) -> None:
        saving.copy_tensors(tensors, saving.tensors_of(self.model), source)


class InitialAdapters:
    """The policy's base under the adapters as they are now: no second model.

    Fresh adapters add nothing, so the reference is the base with adapters off. After a warm start, or from a
    saved adapter, the base would be the wrong one: the policy began as base and adapters together. Then a copy of
    A and B is kept, a few per cent of the base; merging them into the base would round it, and the first KL would
    not be 0.
    """

    def __init__(self, policy: ScoringModel, adapters: "Adapters") -> None:
        self._policy = policy
        self._adapters = adapters
        self._initial = {} if adapters.idle else {name: tensor.clone() for name, tensor in adapters.tensors().items()}

    @contextmanager
    def scoring(self) -> Iterator[ScoringModel]:
        with self._adapters.holding(self._initial) if self._initial else self._adapters.off():
            yield self._policy

    def tensors(self) -> Mapping[str, Tensor]:
        """Empty: adapters off."""
        return self._initial

    def restore(self, tensors: Mapping[str, Tensor], source: Path) -> None:
        present = self._adapters.tensors()
        if tensors and {name: t.shape for name, t in tensors.items()} != {n: t.shape for n, t in present.items()}:
            raise CheckpointError(f"{source} has other adapters than this model: was lora.rank another?")
        self._initial = {name: tensor.to(present[name]) for name, tensor in tensors.items()}


def named_reference(config: RunConfig, policy: PreTrainedModel) -> Reference | None:
    """The model of reference.path; None without a leash or a path. Raises ModelError where it can't be compared."""
    if not (config.kl.coefficient and config.reference.path):
        return None
    model = load_other(config, config.reference)
    if model.config.get_text_config().vocab_size != policy.config.get_text_config().vocab_size:
        raise ModelError(
            "the reference has another vocabulary than the policy: set reference.path to a model of its family"
        )
    return SecondModel(model, config)


def initial_policy(
    config: RunConfig, model: PreTrainedModel, policy: ScoringModel, adapters: "Adapters | None"
) -> Reference:
    """The policy as it is now. `policy` scores with `model`."""
    if adapters is not None:
        return InitialAdapters(policy, adapters)
    dtype = config.reference.dtype
    copied = cast_weights(copy.deepcopy(model), getattr(torch, dtype) if dtype else model.dtype)
    return SecondModel(copied, config)
