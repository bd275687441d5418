"""A run file as a `stoker.batch.target.Workload`: what the largest steps of its run take.

No folder, no data and no reward: prompts are random token ids of the longest length, answers end by length alone. All
that the run holds is held (weights, masters, moments, reference, critic), and a step goes through both of its peaks.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from stoker.batch.controllers.prompts import stage_of
from stoker.config import load as config_load
from stoker.config.schema import RunConfig
from stoker.engine.local.assembly import LocalEngine, assemble, policy_source
from stoker.engine.local.forward import sharing_width
from stoker.engine.local.layout import lines_of
from stoker.engine.local.load import load_tokenizer
from stoker.errors import RunError
from stoker.rl.run import objective_of, scored
from stoker.rl.sampling import sampling_params
from stoker.rl.tasks.encode import context_limit
from stoker.rl.types import KeptTokens, Prompt, Request, Sample, TrainBatch, TrainRow
from stoker.rl.updates import weigh

__all__ = ["RunWorkload", "filling", "make", "workload"]

FULL_BEFORE = 2
"""Micro-batches of the longest groups before the fullest one, as far as an update has samples: the first one's backward
pass still makes the gradient sums that later ones find there."""


def make(run_file: str, *overrides: str) -> "RunWorkload":
    """The workload of a run file, its keys changed by `overrides` (`a.b=c`). For a `stoker.batch.target.Maker`.

    A size is a value of `update.tokens_per_microbatch`; that of the file doesn't matter. Raises ConfigError or
    ModelError where the run couldn't start either.
    """
    return workload(config_load.load(run_file, overrides))


def workload(config: RunConfig) -> "RunWorkload":
    """The same of a config. The weights stay as they are, however many steps are taken."""
    torch.manual_seed(config.seed)
    tokenizer = load_tokenizer(policy_source(config))
    prompt_tokens, _ = context_limit(config, tokenizer)
    still = {"learning_rate": 0.0, "skip_grad_norm_ratio": 0.0}
    measured = config.model_copy(
        update={
            "optimizer": config.optimizer.model_copy(update=still),
            "critic": config.critic.model_copy(update={"optimizer": config.critic.optimizer.model_copy(update=still)}),
            "update": config.update.model_copy(update={"tokens_per_microbatch": prompt_tokens}),
        }
    )
    return RunWorkload(measured, assemble(measured, tokenizer, measuring=True), prompt_tokens)


def filling(size: int, longest: int, samples: int) -> tuple[int, int]:
    """(rows, tokens of each) whose micro-batch comes closest to `size` padded tokens, rows as long as can be.

    At most `samples` rows of at most `longest` tokens. Below one row of `longest` it is that row: an update gives it a
    micro-batch of its own, whatever the ceiling.
    """
    if size <= longest:
        return 1, longest
    rows = min(-(-size // longest), samples)
    return rows, min(size // rows, longest)


class RunWorkload:
    """Implements `stoker.batch.target.Workload` by a run's own sampler and learner."""

    unit = "tokens"

    def __init__(self, config: RunConfig, engine: LocalEngine, prompt_tokens: int) -> None:
        """`engine` is one for measuring. `prompt_tokens`: of the longest prompt."""
        self._config = config
        self._engine = engine
        self._prompt_tokens = prompt_tokens
        self._largest = stage_of(config, config.schedule.most(config.sampling.prompts_per_step))
        self._answer_tokens = config.sampling.max_new_tokens
        self._vocabulary: int = engine.model.config.get_text_config(decoder=True).vocab_size
        self._width = sharing_width(engine.model)
        self.least = prompt_tokens + self._answer_tokens - 1
        """Tokens of the longest row in an update (nothing is predicted from an answer's last one): smaller sizes take
        no less.
        """
        self.most: int | None = self._largest.samples_per_update * self.least
        """A whole update, every row as long as can be: more is never in a micro-batch."""
        engine.learner.begin_rl()
        engine.sampler.push(0)
        self._update([self._row(0, 0, self._samples(1, 1, 1)[0], 1)])  # makes the optimizers' states

    @property
    def device(self) -> torch.device:
        return self._engine.model.device

    def step(self, size: int) -> None:
        """Sample as many answers side by side as the run does, all as long as can be; then one update.

        The update has the run's samples, as far as its fullest micro-batches need them: some of whole groups of the
        longest rows, and one of `filling(size, ...)`. A lack of memory surfaces as the error that it is.
        """
        each = self._config.sampling.samples_per_prompt + self._config.algorithm.needs_greedy
        samples = self._samples(self._largest.prompts_per_step * each, each, self._answer_tokens)
        self._engine.learner.cut_by(size)
        self._update(self.rows(size, samples))

    def rows(self, size: int, samples: Sequence[Sample]) -> list[TrainRow]:
        """Those of the update, made of what the `samples` drew."""
        most = self._largest.samples_per_update
        count, length = filling(size, self.least, most)
        per_group = self._config.sampling.samples_per_prompt
        group = [self._row(0, index, samples[0], self.least) for index in range(per_group)]
        tokens = sum(line.length for line in lines_of(group, max(size, self.least), self._width))
        grouped = min(most - count, per_group * -(-FULL_BEFORE * size // tokens))

        def row(place: int, prompt: int, length: int) -> TrainRow:
            return self._row(prompt, place % per_group, samples[place % len(samples)], length)

        groups = [row(place, place // per_group, self.least) for place in range(grouped)]
        return groups + [row(place, grouped + place, length) for place in range(count)]

    def _samples(self, draws: int, each: int, tokens: int) -> list[Sample]:
        """As many as are drawn at a time, `each` of a prompt, the longest, with answers of so many tokens.

        Where there are more, others enter as those end: their prompts are computed while all caches are full.
        """
        sampler = self._engine.sampler
        params = replace(sampling_params(self._config.sampling), max_new_tokens=tokens, stop=())
        together = min(draws, sampler.concurrent_samples)
        entering = replace(params, max_new_tokens=1)
        requests = []
        for draw in range(min(draws, 2 * together)):
            prompt = Prompt(f"{draw // each}", self._prompt(draw // each, self._prompt_tokens), "", None)
            requests.append(Request(prompt, draw % each, params if draw < together else entering, 0))
        sampler.submit(requests)
        return [sample for sample in sampler.collect() if sample.params is params]

    def _update(self, rows: Sequence[TrainRow]) -> None:
        config, engine = self._config, self._engine
        algorithm, leash = config.algorithm, config.kl.coefficient
        several = self._largest.updates_per_step > 1
        rows = scored(engine.learner, rows, old=several, reference=bool(leash), critic=algorithm.needs_critic)
        batch = TrainBatch(tuple(weigh(rows, algorithm.loss_weighting, self._answer_tokens)))
        engine.learner.forward_backward(batch, objective_of(config, leash))
        if engine.learner.step(0)["optim/skipped"]:
            raise RunError(
                f"a trial's update was refused ({engine.learner.refusal}), as the run's would be: check the weights of "
                f"model.path = {config.model.path!r} and a loss of your own"
            )

    def _row(self, prompt: int, index: int, sample: Sample, length: int) -> TrainRow:
        """`length` tokens: as much of the sample's answer as it holds, after a prompt that is new for each number."""
        count = min(len(sample.token_ids), length)
        blank = np.zeros(count, dtype=np.float32)
        advantages = np.full(count, 1.0 if index % 2 else -1.0, dtype=np.float32)
        kept = sample.kept
        return TrainRow(
            sample_id=f"{prompt}/{index}",
            prompt_ids=self._prompt(prompt, length - count + 1),
            token_ids=sample.token_ids[:count],
            mask=blank == 0,
            weights=blank,
            advantages=advantages,
            sampler_logprobs=sample.logprobs[:count],
            temperature=sample.params.temperature,
            kept=kept and KeptTokens(kept.ids[: kept.offsets[count]], kept.offsets[: count + 1]),
            returns=advantages,
        )

    def _prompt(self, number: int, length: int) -> tuple[int, ...]:
        """Random ids, the first two of which count: no two prompts are equal, so none share a line."""
        ids = np.random.default_rng(number).integers(0, self._vocabulary, length)
        ids[:2] = [number % self._vocabulary, number // self._vocabulary % self._vocabulary][:length]
        return tuple(ids.tolist())
