"""The tables of the run file that name a model: the policy and its reference."""

from typing import Annotated, Literal

from pydantic import Field

from stoker.config.base import Dtype, Section, Text

__all__ = ["Model", "Reference"]


class Model(Section):
    """The policy: which weights, where and in what precision."""

    path: Text = "embedded:tiny"
    """Folder, GGUF file, Hugging Face name, or `embedded:tiny` (a small model that ships with stoker)."""
    from_scratch: bool = False
    """Build from the config with random weights of the run's seed instead of loading weights."""
    dtype: Dtype | Literal["auto"] = "float32"
    """Compute weights; the optimizer keeps an fp32 master copy of 16-bit ones. `auto`: bfloat16 where this device
    multiplies faster in it (measured when the run starts, and kept for its life), else float32."""
    device: str = "auto"
    """`auto` (cuda, then mps, then cpu) or a torch device."""
    threads: Annotated[int, Field(ge=0, le=1024)] = 0
    """CPU threads for compute; 0: what torch takes (one for each core, or OMP_NUM_THREADS)."""
    attention: Literal["sdpa", "eager"] = "sdpa"
    """transformers' attention implementation for training."""
    trust_remote_code: bool = False
    """Run code that comes with the model. Only for sources you trust."""


class Reference(Section):
    """The model that the KL leash ties the policy to."""

    path: str = ""
    """Another model for the KL leash (e.g. the base before SFT); empty: the initial policy."""
    dtype: Dtype | None = None
    """None: the policy's dtype."""
