"""Freed memory is kept, unless the user has said how memory is to be kept."""

import ctypes
import sys

import pytest

from stoker.engine.local import heap


class Glibc:
    def __init__(self) -> None:
        self.asked: list[tuple[int, int]] = []

    def mallopt(self, option: int, value: int) -> None:
        self.asked.append((option, value))


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's malloc")
@pytest.mark.parametrize("name", ["", *heap._CHOSEN])
def test_settings_of_the_environment_stand(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    glibc = Glibc()
    monkeypatch.setattr(ctypes, "CDLL", lambda _: glibc)
    for other in heap._CHOSEN:
        monkeypatch.delenv(other, raising=False)
    if name:
        monkeypatch.setenv(name, "131072")
    heap.keep_freed_memory.__wrapped__()
    assert bool(glibc.asked) is (name == "")
