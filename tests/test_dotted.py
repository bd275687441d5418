import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from stoker import dotted
from stoker.errors import RewardError


def load(path: str) -> Callable[..., object]:
    return dotted.load(path, "reward function", RewardError)


@pytest.fixture(autouse=True)
def _keep_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))


def test_loads_from_a_file_with_its_neighbours(tmp_path: Path) -> None:
    (tmp_path / "neighbour_of_reward.py").write_text("VALUE = 0.5\n")
    (tmp_path / "math.py").write_text(
        "import neighbour_of_reward as n\nclass A:\n    f = staticmethod(lambda: n.VALUE)\n"
    )
    assert load(f"{tmp_path}/math.py:A.f")() == 0.5
    import math

    assert math.sqrt(4) == 2  # a user's math.py replaces nothing


def test_loads_from_a_module() -> None:
    assert load("os.path:basename")("a/b") == "b"


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("os.path", "is not of the form `pkg.mod:fn` or `file.py:fn`"),
        (":f", "is not of the form"),
        ("os.path:basname", "os.path has no 'basname'; did you mean 'basename'"),
        ("os:sep", "is a str, not a function"),
        ("no_such_package.rewards:f", "no module 'no_such_package'"),
        ("os.nothing:f", "no module 'os.nothing'"),
    ],
)
def test_errors_name_what_is_missing(path: str, message: str) -> None:
    with pytest.raises(RewardError, match=message):
        load(path)


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str], str]:
    """write(source): the path of a new file with that Python source."""

    def make(source: str) -> str:
        file = tmp_path / "mine0.py"
        file.write_text(source)
        return str(file)

    return make


def test_a_missing_file_names_the_nearest(write: Callable[[str], str]) -> None:
    path = write("def f(): ...")
    with pytest.raises(RewardError, match=r"mine_0\.py does not exist; did you mean 'mine0\.py'\?"):
        load(path.replace("mine0", "mine_0") + ":f")


def test_a_module_that_imports_something_missing_says_so(write: Callable[[str], str]) -> None:
    with pytest.raises(ModuleNotFoundError, match="absent_dependency"):
        load(write("import absent_dependency") + ":f")


def test_a_module_in_the_working_directory_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the installed command needs it, whose own folder stands on the path instead."""
    (tmp_path / "module_of_a_user.py").write_text("def f(): return 7\n")
    monkeypatch.chdir(tmp_path)
    assert load("module_of_a_user:f")() == 7


def test_a_file_of_a_package_is_to_be_named_as_a_module(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("from .data import rows\n")
    with pytest.raises(RewardError, match=r"train\.py imports from its own package .* `package\.module:fn`"):
        load(f"{tmp_path}/train.py:f")


def test_an_error_is_told_from_the_users_first_line_on(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("def f():\n    return g()\ndef g():\n    raise KeyError('mine')\nf()\n")
    with pytest.raises(KeyError) as caught:
        dotted.load(f"{tmp_path}/train.py:f", "target", RewardError)
    told = dotted.users_traceback(caught.value)
    assert told.count('train.py", line') == 3
    assert "importlib" not in told
    assert "dotted.py" not in told


def test_an_error_without_a_line_of_the_users_is_told_whole() -> None:
    with pytest.raises(RewardError) as caught:
        dotted.load("os.path", "target", RewardError)
    assert "dotted.py" in dotted.users_traceback(caught.value)
