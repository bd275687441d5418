"""The table of the run file about a reward."""

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from stoker.config.base import BUILT_IN_REWARDS, Finite, Fraction, Name, Positive, Section, Text
from stoker.dotted import nearest

__all__ = ["Reward"]


class Reward(Section):
    """One reward function; several are added by weight."""

    function: Text
    """`math`, `exact`, or a user's function `pkg.mod:fn` / `file.py:fn`."""
    signature: Literal["auto", "trl", "verl", "openrlhf", "verifiers"] = "auto"
    """For which framework the function is written: what arguments it gets, one sample at a time or all. auto: known by
    the names of its arguments."""
    name: Name = ""
    """In metrics and messages; empty: the function's."""
    weight: Finite = 1.0
    """Factor in the sum of rewards; may be negative."""
    range: tuple[float, float] | None = None
    """Values the function may return; None: the built-in's own, or [-1, 1]. Outside it: an error, never a scaling."""
    timeout_s: Positive = 10.0
    """Deadline for one answer's check."""
    on_timeout: Finite | None = None
    """Reward of an answer whose check passed its deadline; None: abstain, or end the run where the call that passed it
    scored several."""
    max_error_rate: Fraction = 0.0
    """Share of a step's samples on which the function may raise before the run stops."""
    workers: Annotated[int, Field(ge=0, le=256)] = 0
    """0: one process, called once sampling has ended (trl and openrlhf signatures: with all samples together).
    N: N processes, handed each prompt's samples as soon as all of them have ended, while others are still drawn (of
    `math`, the algebra). The function then sees one prompt's samples at a time, and must depend on its arguments alone:
    not for a function that compares prompts or counts its calls. What it logs is averaged over the prompts."""
    kwargs: dict[str, Any] = {}
    """Of each call of the function; those of `math` and `exact` are in docs/rewards.md."""

    @field_validator("function")
    @classmethod
    def _known(cls, function: str) -> str:
        if function in BUILT_IN_REWARDS or ":" in function:
            return function
        if function.endswith(".py"):
            raise ValueError(f"'{function}' is a file: name the function in it, `{function}:fn`")
        hint = nearest(function, list(BUILT_IN_REWARDS))
        raise ValueError(f"no built-in reward '{function}'{hint}, or give `pkg.mod:fn` or `file.py:fn`")
