"""What a process has used and may still take."""

import resource

import pytest

from stoker.record.memory import address_space_left, available_bytes, peak_resident_bytes


def test_address_space_left_is_what_the_limit_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert address_space_left() is None
    monkeypatch.setattr(resource, "getrlimit", lambda _: (2**50, resource.RLIM_INFINITY))
    left = address_space_left()
    assert left is not None and 0 < 2**50 - left < 2**45
    monkeypatch.setattr(resource, "getrlimit", lambda _: (2**20, resource.RLIM_INFINITY))
    assert address_space_left() == 0


def test_a_peak_and_what_is_available_are_bytes() -> None:
    assert 2**20 < peak_resident_bytes() < 2**45
    assert 2**20 < available_bytes() < 2**50
