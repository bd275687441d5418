"""`from stoker.batch import ...`."""

import subprocess
import sys
from pathlib import Path

import pytest

import stoker.batch
from stoker.errors import ConfigError


@pytest.mark.parametrize("name", stoker.batch.__all__)
def test_every_name_is_there_and_no_module_hides_it(name: str) -> None:
    """An imported module `stoker.batch.fit` would take the place of the function `fit` in the package."""
    folder = Path(stoker.batch.__file__).parent
    assert not (folder / f"{name}.py").exists()
    assert getattr(stoker.batch, name).__name__ == name
    assert getattr(stoker.batch, name).__doc__


def test_the_package_is_light_until_a_name_is_used() -> None:
    code = (
        "import sys, stoker.batch\n"
        "assert 'torch' not in sys.modules\n"
        "from stoker.batch import Sweep\n"
        "assert 'torch' not in sys.modules\n"
        "from stoker.batch import fit\n"
        "import stoker.batch.fitting\n"
        "assert stoker.batch.fit is fit and callable(fit)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_each_function_takes_a_path(tmp_path: Path) -> None:
    """The documentation said so; `prove` found no model in a str, and `sweep` no device."""
    (tmp_path / "train.py").write_text("def make_target():\n    return 3\n")
    for call in (stoker.batch.fit, stoker.batch.sweep, lambda path: stoker.batch.prove(path, size=2)):
        with pytest.raises(ConfigError, match="made a int without unit"):
            call(f"{tmp_path}/train.py:make_target")
