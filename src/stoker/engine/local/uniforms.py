"""One uniform number per (seed, prompt, sample, position), whatever is drawn beside it.

A sample's 64-bit key is a BLAKE2b hash of its seed, prompt id and index; its uniforms are the outputs of
SplitMix64 (Steele, Lea and Flood, OOPSLA 2014) started at the key. Any position is computed directly,
so there is no generator state to carry, save or reorder.
"""

from collections.abc import Iterable
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from stoker.rl.types import Request

__all__ = ["sample_keys", "uniforms"]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def sample_keys(requests: Iterable[Request]) -> NDArray[np.uint64]:
    """The key of each request's stream, (B,)."""
    return np.array([_key(r.seed, r.prompt.id, r.index) for r in requests], dtype=np.uint64)


def uniforms(keys: NDArray[np.uint64], positions: int | NDArray[np.int64]) -> NDArray[np.float64]:
    """Uniforms in [0, 1) at a response position, the rows' own or one for all, (B,): 53 random bits each."""
    # An array, not a scalar: numpy wraps arrays silently, as SplitMix64 wants, but warns on scalars.
    state = keys + (np.atleast_1d(positions) + 1).astype(np.uint64) * _GOLDEN
    state = (state ^ (state >> np.uint64(30))) * _MIX_1
    state = (state ^ (state >> np.uint64(27))) * _MIX_2
    state = state ^ (state >> np.uint64(31))
    return (state >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _key(seed: int, prompt_id: str, index: int) -> int:
    # The id comes last, so no id can imitate another seed or index.
    text = f"{seed}/{index}/{prompt_id}".encode("utf-8", "surrogatepass")
    return int.from_bytes(blake2b(text, digest_size=8).digest(), "little")
