"""Requests out, samples back in the prompts' order."""

from collections.abc import Iterator, Sequence

import numpy as np

from stoker.rl.sampling import draw, draw_seed, groups_by_prompt
from stoker.rl.types import Prompt, Request, Sample, SamplingParams, Scored


class Backwards:
    """A sampler that finishes in the reverse of the order asked."""

    def submit(self, requests: Sequence[Request]) -> None:
        self.requests = list(requests)

    def collect(self) -> Iterator[Sample]:
        for one in reversed(self.requests):
            ids = np.zeros(1, dtype=np.int32)
            yield Sample(one.prompt, one.index, one.params, 0, ids, ids.astype(np.float32), "", "stop")


def test_samples_come_back_in_the_prompts_order() -> None:
    prompts = [Prompt(name, (1,), name, None) for name in "abc"]
    samples = draw(Backwards(), prompts, 2, SamplingParams(), seed=1)  # type: ignore[arg-type]
    assert [sample.id for sample in samples] == ["a/0", "a/1", "b/0", "b/1", "c/0", "c/1"]


def test_groups_are_keyed_by_prompt_id_not_by_text() -> None:
    twins = [Prompt("s:0", (1,), "same text", None), Prompt("s:1", (1,), "same text", None)]
    samples = draw(Backwards(), twins, 2, SamplingParams(), seed=1)  # type: ignore[arg-type]
    groups = groups_by_prompt(Scored(sample, {}, None) for sample in reversed(samples))
    assert [group.prompt.id for group in groups] == ["s:1", "s:0"]
    assert [len(group.scored) for group in groups] == [2, 2]


def test_seeds_differ_by_step_and_purpose_and_never_by_call() -> None:
    seeds = {draw_seed(run, purpose, step) for run in range(3) for purpose in ("train", "eval") for step in range(100)}
    assert len(seeds) == 600
    assert draw_seed(1, "train", 2) == draw_seed(1, "train", 2)
    assert all(0 <= seed < 2**63 for seed in seeds)
