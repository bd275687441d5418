"""The tables of the run file about models: the policy, its adapters, its reference."""

from typing import Annotated, Literal

from pydantic import Field

from stoker.config.base import Dtype, NonNegativeInt, Positive, Section, Text

__all__ = ["Lora", "Model", "Reference"]


class Model(Section):
    """The policy: which weights, where and in what precision."""

    path: Text = "embedded:tiny"
    """Folder, GGUF file, Hugging Face name, or `embedded:tiny` (a small model that ships with stoker)."""
    from_scratch: bool = False
    """Build from the config with random weights of the run's seed instead of loading weights."""
    dtype: Literal[Dtype, "auto"] = "float32"
    """Compute weights; the optimizer keeps an fp32 master copy of 16-bit ones. `auto`: bfloat16 where this device
    multiplies faster in it (measured when the run starts, and kept for its life), else float32."""
    device: str = "auto"
    """`auto` (cuda, then mps, then cpu) or a torch device."""
    threads: Annotated[int, Field(ge=0, le=1024)] = 0
    """CPU threads for compute; 0: what torch takes (one for each core, or OMP_NUM_THREADS)."""
    attention: Literal["sdpa", "eager"] = "sdpa"
    """transformers' attention implementation for training; of some models (Gemma 2, BLOOM) it has `eager` alone."""
    trust_remote_code: bool = False
    """Run code that comes with the model. Only for sources you trust."""


class Reference(Section):
    """The model that the KL leash ties the policy to."""

    path: str = ""
    """Another model for the KL leash (e.g. the base before SFT); empty: the initial policy."""
    dtype: Dtype | None = None
    """None: the policy's dtype."""


class Lora(Section):
    """Train low-rank adapters beside frozen weights: W x + (alpha / rank) B A x. Needs `pip install 'stoker[lora]'`.

    There is no dropout: with it the policy that is trained would be another than the one that sampled.
    """

    rank: NonNegativeInt = 0
    """Rows of A and columns of B; 0: no adapters, all weights are trained."""
    alpha: Positive = 32.0
    """Scale of the adapters' part, divided by the rank, so that one learning rate suits every rank."""
    target_modules: tuple[Text, ...] = ()
    """Last parts of the names of linear maps, e.g. `q_proj`; empty: every linear map but the head."""
    checkpoint: Literal["adapter", "merged"] = "adapter"
    """What a checkpoint's `policy` folder holds: the adapters alone (loads with peft, needs the base), or the weights
    with the adapters added (loads with transformers alone). A resume uses neither: the adapters are kept beside it."""

    def conflict(self, needs_critic: bool, model: Model, reference: Reference, start_from: str) -> str | None:
        """What in the rest of the run file doesn't go with adapters, and the way out."""
        if not self.rank:
            return None
        if needs_critic:
            return (
                "lora.rank > 0 with algorithm.advantage = 'gae' (ppo): the critic is a second whole model that "
                "trains all its weights, which adapters are to save: use algorithm.name = 'grpo', or lora.rank = 0"
            )
        if model.from_scratch and not start_from and self.checkpoint == "adapter":
            return (
                "lora.checkpoint = 'adapter' keeps no base weights, and with model.from_scratch = true there are none "
                "on the disk to add the adapters to: set lora.checkpoint = 'merged'"
            )
        if reference.dtype not in (None, model.dtype) and not reference.path:
            return (
                f"reference.dtype = {reference.dtype!r}: with adapters the reference is the policy's own base, in "
                f"model.dtype = {model.dtype!r}; leave it out, or name another model as reference.path"
            )
        return None
