"""Files that a run file names and that aren't there."""

from pathlib import Path

import pytest

from stoker.config import load as config_load
from stoker.config.paths import missing_files


def test_what_can_only_be_a_local_file_is_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("here.jsonl").touch()
    Path("here.py").touch()
    sources = ("here.jsonl", "gone.jsonl", "org/hub-name", "gone.py:rows")
    config = config_load.from_dict(
        {
            "name": "run",
            "model": {"path": "/no/such/model"},
            "task": {"sources": [{"path": path} for path in sources]},
            "rewards": [{"function": path} for path in ("math", "here.py:fn", "gone.py:fn", "installed.pkg:fn")],
            "algorithm": {"advantage": "group", "loss": "gone.py:loss"},
        }
    )
    assert missing_files(config) == [
        f"task.sources.1.path = 'gone.jsonl': there is no gone.jsonl (looked in {tmp_path})",
        f"task.sources.3.path = 'gone.py:rows': there is no gone.py (looked in {tmp_path})",
        f"rewards.2.function = 'gone.py:fn': there is no gone.py (looked in {tmp_path})",
        f"algorithm.loss = 'gone.py:loss': there is no gone.py (looked in {tmp_path})",
        f"model.path = '/no/such/model': there is no /no/such/model (looked in {tmp_path})",
    ]
