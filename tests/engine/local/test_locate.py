"""Where a model's files are looked for."""

from pathlib import Path

import pytest

from stoker.engine.local.locate import locate
from stoker.errors import ModelError


def test_a_mistyped_run_is_not_looked_for_on_a_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("runs/first").mkdir(parents=True)
    Path("runs/first/config.toml").touch()
    with pytest.raises(ModelError, match="no such folder in runs, which holds runs; did you mean 'first'"):
        locate("runs/frist")
    assert locate("org/name") == ("org/name", None)
    monkeypatch.chdir("runs")
    assert locate("gpt2") == ("gpt2", None)
