"""Talking to a checkpoint: whose run file is taken."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from stoker.config.task import Source, Task
from stoker.trying import _asked_as, _run_file


def test_only_the_run_that_saved_a_policy_says_how_to_ask_it(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "first"
    policy = run / "checkpoints" / "step_2" / "policy"
    model = tmp_path / "models" / "mine"
    for folder in (policy, model):
        folder.mkdir(parents=True)
    (run / "config.toml").write_text("")
    (tmp_path / "config.toml").write_text("title = 'of some other program'")
    assert _run_file(policy) == run / "config.toml"
    assert _run_file(model) is None


USER = {"role": "user", "content": "1+1?"}
SYSTEM = {"role": "system", "content": "Be brief."}


@pytest.mark.parametrize(
    ("prompt", "own", "chat", "system"),
    [
        ("1+1=", "", "auto", ""),
        ([USER], "", "always", ""),
        ([SYSTEM, USER], "", "always", "Be brief."),
        ([SYSTEM, USER], "Be kind.", "always", "Be brief."),  # a row's own wins
        ([USER], "Be kind.", "always", "Be kind."),
        (None, "", "auto", ""),  # nothing recorded
    ],
)
def test_a_question_takes_the_form_that_the_runs_prompts_had(
    tmp_path: Path, prompt: Any, own: str, chat: str, system: str
) -> None:
    if prompt is not None:
        (tmp_path / "samples").mkdir()
        with gzip.open(tmp_path / "samples" / "step_1.jsonl.gz", "wt") as file:
            file.write(
                json.dumps({"schema_version": 1, "kind": "samples"}) + "\n" + json.dumps({"prompt": prompt}) + "\n"
            )
    task = _asked_as(Task(sources=(Source(path="x.jsonl"),), system_prompt=own), tmp_path)
    assert (task.chat, task.system_prompt) == (chat, system)
