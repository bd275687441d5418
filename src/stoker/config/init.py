"""A first run file with comments that teach: the unit of each number and when to change it."""

import json
import re
from dataclasses import dataclass

from stoker.config.algorithm import RECIPES

__all__ = ["ENOUGH_ROWS", "Answers", "default_reward", "name_of", "template"]

EMBEDDED_MODEL = "embedded:tiny"
EMBEDDED_TASK = "stoker.embedded.addition:problems"
ENOUGH_ROWS = 640
"""A fifth of the rows is held out, but never more than a fifth of these: no need to count on."""


@dataclass(frozen=True)
class Answers:
    """The few things `stoker init` asks; the defaults make a run that works anywhere."""

    name: str = "first-run"
    model: str = EMBEDDED_MODEL
    """Folder, GGUF file or Hugging Face name."""
    data: str = EMBEDDED_TASK
    """File, dataset or generator with prompts and answers."""
    reward: str = "exact"
    """`math`, `exact`, or a user's function."""
    algorithm: str = "grpo"
    """One of the recipes of `config.algorithm`."""
    rows: int = 0
    """Of the data; 0 where that isn't known. Beyond ENOUGH_ROWS they change nothing."""
    prompts_per_step: int = 32
    samples_per_prompt: int = 8
    steps: int = 100

    @property
    def embedded(self) -> bool:
        """Whether the policy is the small model that ships with stoker, without trained weights."""
        return self.model == EMBEDDED_MODEL


def default_reward(model: str) -> str:
    """The embedded model is first taught the bare reference answers, in which `math` would find no answer."""
    return "exact" if model == EMBEDDED_MODEL else "math"


def name_of(file: str) -> str:
    """A run's name out of its file's: `my run.toml` becomes my-run."""
    name = re.sub(r"[^A-Za-z0-9._-]+|\.{2,}", "-", file.removesuffix(".toml")).strip("-_.")
    return name[:100] or Answers.name


def template(answers: Answers) -> str:
    """The run file as TOML text; it loads as it is."""
    parts = (_head(answers), _model(answers), _task(answers), _learning(answers), _running(answers))
    return "\n".join(part for part in parts if part)


def _text(value: str) -> str:
    """A TOML string: JSON's escapes are TOML's, but for DEL."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _head(answers: Answers) -> str:
    return f"""\
# A stoker run. `stoker train FILE --dry-run` prints what these numbers mean; `stoker train FILE` runs it.
# Any key can be overridden on the command line: stoker train FILE sampling.temperature=0.8
#
# prompt: one row of the task.  sample: one generated answer.  group: the samples of one prompt.
# step: one rollout and its updates.  update: one optimizer step.

name = {_text(answers.name)}  # the run's folder under runs/
seed = 0
"""


def _model(answers: Answers) -> str:
    if answers.embedded:
        return f"""\
[model]
path = {_text(answers.model)}  # a small model that ships with stoker
from_scratch = true  # random weights of the run's seed, so it learns the task's form first: warm_start

[warm_start]  # supervised learning on the task's own answers before RL
updates = 300  # optimizer steps; 0 for a model that already answers now and then
examples_per_update = 64
learning_rate = 1e-3
"""
    return f"""\
[model]
path = {_text(answers.model)}  # folder, GGUF file or Hugging Face name
dtype = "auto"  # of the compute weights: bfloat16 where this machine is faster in it, else float32
"""


_REWARDS = {
    "math": "the final answer: boxed, <answer>, ####, or after 'the answer is'",
    "exact": "the whole answer equals the reference",
}


def _task(answers: Answers) -> str:
    kwargs = ", kwargs = { digits = 2, count = 4000, seed = 0 }" if answers.data == EMBEDDED_TASK else ""
    lengths = (16, 8) if kwargs else (40, 24) if answers.embedded else (1024, 512)  # embedded:tiny ends at 64
    held_out = min(answers.rows or ENOUGH_ROWS, ENOUGH_ROWS) // 5
    return f"""\
[task]
sources = [{{ path = {_text(answers.data)}{kwargs} }}]
max_prompt_tokens = {lengths[0]}  # longer prompts stop the run at the start: nothing is cut silently

[validation]
holdout = {held_out}  # rows kept out of training; 0 if you name sets of your own
every_samples = {10 * answers.prompts_per_step * answers.samples_per_prompt}  # samples between evaluations: ten steps

[[rewards]]
function = {_text(answers.reward)}  # {_REWARDS.get(answers.reward, "your own")}; docs/rewards.md

[sampling]
prompts_per_step = {answers.prompts_per_step}  # distinct prompts; under 16 the gradient follows single ones
samples_per_prompt = {answers.samples_per_prompt}  # a group; under 4 is a poor baseline; more for hard prompts
temperature = 1.0  # raise it where all samples of a group look alike
max_new_tokens = {lengths[1]}  # raise it where many answers are cut (truncated share above 5 %)
"""


def _learning(answers: Answers) -> str:
    rate = (
        ("1e-4", "from 1e-6 to 5e-6 around 7B; smaller models take more")
        if answers.embedded
        else (
            "2e-6",
            "1e-6 to 5e-6 suits about 7B; smaller models take more: --smoke warns where it doesn't fit",
        )
    )
    critic, leash = "", 0.0 if RECIPES[answers.algorithm].leash == "none" else 0.04
    if answers.algorithm == "ppo":
        critic = f"""
[critic]  # the value model, started from the policy
optimizer = {{ learning_rate = {"3e-4" if answers.embedded else "1e-5"}, warmup_fraction = 0.0 }}
"""
    return f"""\
[algorithm]
name = {_text(answers.algorithm)}  # {RECIPES[answers.algorithm].title}; docs/algorithms.md has them all
{critic}
[kl]
coefficient = {leash}  # leash to the initial policy; 0 saves the reference model's memory
adaptive = false  # true: the coefficient follows the measured KL, towards kl.target nats per sequence

[optimizer]
learning_rate = {rate[0]}  # at the peak; {rate[1]}
warmup_fraction = 0.03  # share of the run's samples; 2 to 5 % is usual
"""


def _running(answers: Answers) -> str:
    return f"""\
[update]
samples_per_update = 0  # samples behind one optimizer step; 0: the whole step, so the policy stays on-policy
tokens_per_microbatch = 4096  # memory and speed only, never the gradient; lower it when memory runs out, or "auto"

[stop]
steps = {answers.steps}
"""
