"""Every package whose names come when asked for."""

from importlib import import_module
from types import ModuleType

import pytest

PACKAGES = ("stoker", "stoker.batch", "stoker.memory", "stoker.rl.rewards")


@pytest.fixture(params=PACKAGES)
def package(request: pytest.FixtureRequest) -> ModuleType:
    return import_module(request.param)


def test_every_name_is_there_and_is_listed(package: ModuleType) -> None:
    assert set(package.__all__) | {"__all__", "__name__", "__doc__"} <= set(dir(package))
    for name in package.__all__:
        assert getattr(package, name).__name__ == name


def test_no_name_is_there_that_the_package_does_not_promise(package: ModuleType) -> None:
    """`dir` has modules that something imported, and nothing that comes when asked for but `__all__`."""
    lazy = set(dir(package)) - set(vars(package))
    assert lazy <= set(package.__all__)


def test_an_unknown_name_is_an_error_of_the_package(package: ModuleType) -> None:
    with pytest.raises(AttributeError, match=f"module '{package.__name__}' has no attribute 'fitt'"):
        _ = package.fitt
