"""Talk to a checkpoint: questions in, answers out, nothing recorded."""

import secrets
from collections.abc import Callable
from pathlib import Path

from stoker.config import load as config_load
from stoker.config.schema import Model, Source, Task
from stoker.engine.checkpoint import policy_folder
from stoker.engine.local.load import load_model, load_tokenizer
from stoker.engine.local.sampler import LocalSampler
from stoker.record.printable import printable
from stoker.record.read import read_samples
from stoker.rl.sampling import draw
from stoker.rl.tasks import Row
from stoker.rl.tasks.encode import encode_rows
from stoker.rl.types import Prompt, SamplingParams

__all__ = ["open_conversation"]

EMPTY = "(an empty answer)"
LONGEST = 256
"""Tokens of an answer where no run file says how long one may be."""


def _run_file(policy: Path) -> Path | None:
    """config.toml of the run that a policy was saved by; other folders may hold some other program's."""
    checkpoints = policy.resolve().parent.parent
    found = checkpoints.parent / "config.toml"
    return found if checkpoints.name == "checkpoints" and found.is_file() else None


def _asked_as(task: Task, run: Path) -> Task:
    """The task as its rows asked: where their prompts were messages a question is one too, after the same system
    message. The newest record of samples tells; without one the task is left as it is.
    """
    recorded = sorted(run.glob("samples/*.jsonl.gz"), key=lambda file: file.stat().st_mtime)
    samples = read_samples(recorded[-1]) if recorded else []
    if not samples or isinstance(samples[0]["prompt"], str):
        return task
    first = samples[0]["prompt"][0]
    system = first["content"] if first["role"] == "system" else task.system_prompt
    return task.model_copy(update={"chat": "always", "system_prompt": system})


def open_conversation(
    path: Path, *, samples: int, temperature: float, max_new_tokens: int | None
) -> Callable[[str], list[str]]:
    """Load the newest policy under `path`; the returned function asks it, with the run's own system prompt and form.

    Raises CheckpointError or ModelError where there is no model to talk to.
    """
    folder = policy_folder(path)
    run_file = _run_file(folder)
    config = config_load.load(run_file) if run_file else None
    model_config = (
        Model(path=str(folder))
        if config is None
        else config.model.model_copy(update={"path": str(folder), "from_scratch": False})
    )
    tokenizer = load_tokenizer(model_config)
    model = load_model(model_config, seed=0)
    compiled = config.sampling.compiled if config else True
    sampler = LocalSampler(model, tokenizer, concurrent_samples=max(samples, 1), compiled=compiled)
    stop = config.sampling.stop if config else ()
    limit = max_new_tokens or (config.sampling.max_new_tokens if config else LONGEST)
    params = SamplingParams(temperature=temperature, max_new_tokens=limit, stop=stop)

    task = (
        _asked_as(config.task, run_file.parent)
        if config and run_file
        else Task(sources=(Source(path="-"),), chat="always" if tokenizer.chat_template else "never")
    )

    def ask(question: str) -> list[str]:
        question = question.encode(errors="replace").decode()  # bytes that are not UTF-8 arrive as half surrogates
        row = Row("try:0", "try", "your question", question, None, {})
        prompt = Prompt(row.id, encode_rows([row], tokenizer, task, str(folder))[0], question, None)
        return [printable(one.text) or EMPTY for one in draw(sampler, [prompt], samples, params, secrets.randbits(63))]

    return ask
