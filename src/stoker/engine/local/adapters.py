"""The low-rank adapters (peft) inside a model: turned off, exchanged, merged, saved.

An adapted linear map computes W x + s B A x, with A (rank, in), B (out, rank) and s = alpha / rank. Only A and B are
trained. W never changes, so it needs no gradient and no optimizer state, and serves policy and reference alike.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from transformers import PreTrainedModel

from stoker.config import schema
from stoker.engine.local import saving
from stoker.errors import CheckpointError

__all__ = ["ADAPTER", "Adapters", "layers_of", "peft_config"]

ADAPTER = "default"
"""peft's name for the one adapter of a model; part of parameter names, not of what is saved."""
_FINGERPRINT_VALUES = 1024
"""Values of a tensor that its fingerprint looks at: enough to tell models apart, few enough to cost nothing."""


def layers_of(model: nn.Module) -> dict[str, Any]:
    """The adapted maps (peft's `LoraLayer`s) by name, in the order of the model."""
    return {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}


def peft_config(model: nn.Module) -> LoraConfig:
    """What peft was told when the adapters were put in."""
    return model.peft_config[ADAPTER]  # type: ignore[index, return-value]  # peft hangs it on any module


class Adapters:
    """Plain adapters on linear maps, under a base that stays as it is. Holds no copy of any weight."""

    def __init__(self, model: PreTrainedModel, settings: schema.Lora) -> None:
        self._model = model
        self._settings = settings
        self._layers = layers_of(model)
        self.parameters: dict[str, nn.Parameter] = {
            f"{name}.{part}.{ADAPTER}.weight": getattr(layer, part)[ADAPTER].weight
            for name, layer in self._layers.items()
            for part in ("lora_A", "lora_B")
        }
        """A and B of each map, by their names in the model."""

    @property
    def notes(self) -> list[str]:
        """A sentence for the user."""
        trained = sum(parameter.numel() for parameter in self.parameters.values())
        total = sum(parameter.numel() for parameter in self._model.parameters())
        return [
            f"adapters of rank {self._settings.rank} on {len(self._layers)} linear maps: {trained:,} parameters are "
            f"trained beside {total - trained:,} that stay as they are"
        ]

    def tensors(self) -> dict[str, Tensor]:
        """A and B as they are now, in the compute dtype; not copies."""
        return {name: parameter.detach() for name, parameter in self.parameters.items()}

    # -- as a reference --------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        """Every B is zero, as adapters begin: the model is its base, to the last bit."""
        return not any(bool(tensor.any()) for name, tensor in self.tensors().items() if ".lora_B." in name)

    @contextmanager
    def off(self) -> Iterator[None]:
        """The base alone: the same numbers as before any adapter was put in."""
        for layer in self._layers.values():
            layer.enable_adapters(False)
        try:
            yield
        finally:
            for layer in self._layers.values():
                layer.enable_adapters(True)

    @contextmanager
    def holding(self, tensors: Mapping[str, Tensor]) -> Iterator[None]:
        """These A and B in the place of the present ones, which come back afterwards; nothing is copied."""
        present = {name: parameter.data for name, parameter in self.parameters.items()}
        try:
            for name, parameter in self.parameters.items():
                parameter.data = tensors[name]
            yield
        finally:
            for name, parameter in self.parameters.items():
                parameter.data = present[name]

    # -- saving ----------------------------------------------------------------------------------

    def merged(self) -> dict[str, Tensor]:
        """The model's state with the adapters added to its weights, under the names it has without adapters.

        The sum is made in fp32 and rounded once to the compute dtype. Other tensors are the model's own.
        """
        weights = {f"{name}.base_layer.weight": _sum(layer) for name, layer in self._layers.items()}
        state = {name: tensor for name, tensor in self._model.state_dict().items() if name not in self.parameters}
        return {name.replace(".base_layer.", "."): weights.get(name, tensor) for name, tensor in state.items()}

    def policy_bytes(self) -> int:
        """About what `policy/` takes."""
        saved = self._model.parameters() if self._settings.checkpoint == "merged" else self.parameters.values()
        return sum(parameter.nbytes for parameter in saved)

    def save(self, folder: Path, tokenizer: Any) -> None:
        """`adapters.*`, which a resume reads, and `policy/`, which others load (see `Lora.checkpoint`)."""
        saving.save_tensors(self.tensors(), folder / "adapters.safetensors")
        facts = {"schema_version": 1, "policy": self._settings.checkpoint, "base": self._base_fingerprint()}
        saving.save_json(facts, folder / "adapters.json")
        policy = folder / "policy"
        if self._settings.checkpoint == "merged":
            saving.save_policy(self._model, tokenizer, policy, self.merged())
            return
        names = {name: f"base_model.model.{name.replace(f'.{ADAPTER}.', '.')}" for name in self.parameters}
        saving.save_tensors(
            {names[name]: t for name, t in self.tensors().items()}, policy / "adapter_model.safetensors"
        )
        settings = peft_config(self._model).to_dict() | {"inference_mode": True}
        (policy / "adapter_config.json").write_text(json.dumps(settings, indent=2, default=sorted), encoding="utf-8")
        tokenizer.save_pretrained(policy)

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        """Inverse of `save`, in place, to the last bit. Raises CheckpointError where they are of another model."""
        if saving.load_json(folder / "adapters.json").get("base") != self._base_fingerprint():
            raise CheckpointError(
                f"{folder} has adapters of another base than this model: its weights, its dtype or model.path changed "
                "since; bring the base back, for adapters mean nothing on another"
            )
        path = folder / "adapters.safetensors"
        saved = saving.load_tensors(path)
        if {name: t.shape for name, t in saved.items()} != {name: p.shape for name, p in self.parameters.items()}:
            raise CheckpointError(
                f"{path} has other adapters than this model: was lora.rank or lora.target_modules another? Resume with "
                "the saved config.toml, or start a new run from a merged policy"
            )
        saving.copy_tensors(saved, self.parameters, path)

    def _base_fingerprint(self) -> str:
        """Of names, shapes, dtypes and a spread of values of everything but the adapters."""
        digest = hashlib.sha256()
        for name, tensor in saving.tensors_of(self._model).items():
            if name not in self.parameters:
                values = tensor.flatten()[:: max(1, tensor.numel() // _FINGERPRINT_VALUES)].double().cpu()
                plain = name.replace(".base_layer.", ".")  # the same whichever maps have adapters
                digest.update(f"{plain} {tuple(tensor.shape)} {tensor.dtype}".encode())
                digest.update(values.numpy().tobytes())
        return digest.hexdigest()


def _sum(layer: Any) -> Tensor:
    """W + s B A of one map, in W's dtype and layout."""
    weight = layer.get_base_layer().weight.detach()
    wide = torch.promote_types(weight.dtype, torch.float32)
    a, b = (part[ADAPTER].weight.detach().to(wide) for part in (layer.lora_A, layer.lora_B))
    delta = (b @ a).mul_(layer.scaling[ADAPTER])
    if layer.fan_in_fan_out:  # GPT-2 stores its matrices transposed
        delta = delta.t()
    return (weight.to(wide) + delta).to(weight.dtype)
