"""From prompts to samples: which draws to ask of the sampler, and back into groups."""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from stoker.config import schema
from stoker.rl.ports import Sampler
from stoker.rl.types import Group, Prompt, Request, Sample, SamplingParams, Scored

__all__ = ["draw", "draw_seed", "greedy_params", "groups_by_prompt", "sample_record", "sampling_params"]


def sampling_params(config: schema.Sampling) -> SamplingParams:
    """The sampled distribution that a run file asks for."""
    return SamplingParams(
        temperature=config.temperature,
        top_p=config.top_p,
        top_k=config.top_k,
        max_new_tokens=config.max_new_tokens,
        stop=config.stop,
    )


def greedy_params(config: schema.Sampling) -> SamplingParams:
    """The most likely token at each position, with the run's own limits."""
    return SamplingParams(temperature=0.0, max_new_tokens=config.max_new_tokens, stop=config.stop)


def draw_seed(run_seed: int, purpose: str, step: int) -> int:
    """A 63-bit seed that differs from step to step, so that a prompt seen again is drawn afresh."""
    digest = hashlib.blake2b(f"{run_seed}/{purpose}/{step}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def draw(
    sampler: Sampler,
    prompts: Sequence[Prompt],
    samples_per_prompt: int,
    params: SamplingParams,
    seed: int,
    *,
    greedy: SamplingParams | None = None,
    group_done: Callable[[Sequence[Sample]], None] | None = None,
) -> list[Sample]:
    """`samples_per_prompt` samples of each prompt, in the prompts' order whatever the order of completion.

    `greedy`: one more for each, drawn so, the last of its prompt. `group_done`: told the samples of a prompt as
    soon as all of them have ended.
    """
    each = [params] * samples_per_prompt + ([greedy] if greedy else [])
    requests = [Request(prompt, index, one, seed) for prompt in prompts for index, one in enumerate(each)]
    sampler.submit(requests)
    by_key: dict[tuple[str, int], Sample] = {}
    drawing = {prompt.id: len(each) for prompt in prompts}
    for sample in sampler.collect():
        name = sample.prompt.id
        by_key[name, sample.index] = sample
        drawing[name] -= 1
        if group_done is not None and not drawing[name]:
            group_done([by_key[name, index] for index in range(len(each))])
    return [by_key[request.prompt.id, request.index] for request in requests]


def groups_by_prompt(scored: Iterable[Scored]) -> list[Group]:
    """Scored samples by prompt id (never by text or position), in order of first appearance."""
    by_id: dict[str, list[Scored]] = {}
    for one in scored:
        by_id.setdefault(one.sample.prompt.id, []).append(one)
    return [Group(members[0].sample.prompt, tuple(members)) for members in by_id.values()]


def sample_record(scored: Scored) -> dict[str, Any]:
    """One answer as a line of the run folder's samples."""
    sample = scored.sample
    return {
        "id": sample.id,
        "prompt": sample.prompt.content,
        "answer": sample.prompt.answer,
        "text": sample.text,
        "finish": sample.finish,
        "tokens": len(sample.token_ids),
        "reward": scored.reward,
        "rewards": dict(scored.rewards),
        "parsed": scored.parsed,
        "weight_version": sample.weight_version,
    }
