"""The algorithmic work that passes a run's ports, by phase: what the method asks for, whatever the engine does with it.

Each distinct prompt of a call counts once, an answer's last token (from which nothing is predicted) not at all, nor
rows that a loss can't learn from.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import nn

from stoker.batch.flops import Work, work_of_config, work_of_parameters
from stoker.rl.ports import Learner, Metrics, Role, Sampler
from stoker.rl.types import Floats, Objective, Sample, TrainBatch, TrainRow
from stoker.rl.updates import skippable

__all__ = ["CountingLearner", "CountingSampler", "WorkTally", "model_work", "rows_flops", "samples_flops"]


class WorkTally:
    """FLOPs and tokens by phase; `phase` says which one is on."""

    def __init__(self, phase: Callable[[], str]) -> None:
        self.flops: defaultdict[str, int] = defaultdict(int)
        self.tokens: defaultdict[str, int] = defaultdict(int)
        """Drawn tokens where answers are drawn, else tokens of prompts and answers passed through a model."""
        self._phase = phase

    def add(self, flops: int, tokens: int) -> None:
        self.flops[self._phase()] += flops
        self.tokens[self._phase()] += tokens


class CountingSampler:
    """`rl.ports.Sampler` that tells a tally what it drew; everything else is the sampler's own."""

    def __init__(self, sampler: Sampler, work: Work, tally: WorkTally) -> None:
        self._sampler, self._work, self._tally = sampler, work, tally

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sampler, name)

    def collect(self) -> Iterator[Sample]:
        drawn: list[Sample] = []
        for sample in self._sampler.collect():
            drawn.append(sample)
            yield sample
        self._tally.add(samples_flops(drawn, self._work), sum(len(sample.token_ids) for sample in drawn))


class CountingLearner:
    """`rl.ports.Learner` that tells a tally what it was given; everything else is the learner's own."""

    def __init__(self, learner: Learner, works: dict[Role, Work], tally: WorkTally) -> None:
        self._learner, self._works, self._tally = learner, works, tally

    def __getattr__(self, name: str) -> Any:
        return getattr(self._learner, name)

    def score(self, rows: Sequence[TrainRow], role: Role) -> list[Floats]:
        self._count([row for row in rows if row.mask.any()], role, training=False)
        return self._learner.score(rows, role)

    def forward_backward(self, batch: TrainBatch, objective: Objective) -> Metrics:
        rows = [row for row in batch.rows if not skippable(row, objective)]
        if objective.loss != "value":
            self._count(rows, "policy", training=True)
        if "critic" in self._works and objective.loss != "sft":
            self._count(rows, "critic", training=True)
        return self._learner.forward_backward(batch, objective)

    def _count(self, rows: Sequence[TrainRow], role: Role, *, training: bool) -> None:
        work = self._works.get(role, self._works["policy"])  # a reference is of the policy's family
        self._tally.add(rows_flops(rows, work, training=training), sum(_fed(rows)))


def samples_flops(samples: Sequence[Sample], work: Work) -> int:
    """Each distinct prompt once, then every answer token by token."""
    prompts = {sample.prompt.token_ids for sample in samples}
    prefill = sum(work.prefill(len(prompt)) for prompt in prompts)
    return prefill + sum(work.decode(len(s.prompt.token_ids), len(s.token_ids) - 1) for s in samples)


def rows_flops(rows: Sequence[TrainRow], work: Work, *, training: bool) -> int:
    """Each distinct prompt once, then every answer; logits where a token is scored."""
    method = work.training if training else work.forward
    prompts = {row.prompt_ids for row in rows}
    shared = sum(method(len(prompt), scored=0) for prompt in prompts)
    return shared + sum(method(len(row.token_ids) - 1, len(row.prompt_ids), int(row.mask.sum())) for row in rows)


def _fed(rows: Sequence[TrainRow]) -> Iterator[int]:
    """Positions of each distinct prompt, then of each answer."""
    yield from (len(prompt) for prompt in {row.prompt_ids for row in rows})
    yield from (len(row.token_ids) - 1 for row in rows)


def model_work(model: nn.Module, *, head: bool = True) -> Work:
    """Of a loaded model; by parameter count where its kind isn't known. `head`: False for a critic, which has none."""
    config = model.config.get_text_config()  # type: ignore[union-attr,operator]
    table, output = model.get_input_embeddings(), model.get_output_embeddings()  # type: ignore[operator]
    known = work_of_config(config)
    if known is None:
        tied = output is not None and output.weight is table.weight
        parameters = sum(p.numel() for p in model.parameters())
        known = work_of_parameters(parameters, 0 if tied else table.weight.numel())
    adapters = sum(p.numel() for name, p in model.named_parameters() if "lora_" in name and p.requires_grad)
    return Work(known.linear, known.head if head else 0, known.attention, adapters)
