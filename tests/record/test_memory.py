"""What a process has used and may still take."""

import resource
from pathlib import Path

import pytest

from stoker.record.memory import address_space_left, available_bytes, group_bytes_left, peak_resident_bytes


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


def group(folder: Path, limit: str, files: dict[str, str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in {limit: files["most"], **files}.items():
        (folder / name).write_text(text + "\n")


def test_a_container_has_less_than_its_machine(tmp_path: Path) -> None:
    """A fit in a container took all of the machine for its limit, and the kernel ended what ran there."""
    own = tmp_path / "own"
    root = tmp_path / "cgroup"
    own.write_text("0::/a/b\n")
    stat = "anon 1\ninactive_file 30"
    group(root / "a" / "b", "memory.max", {"most": "max", "memory.current": "70", "memory.stat": stat})
    group(root / "a", "memory.max", {"most": "1000", "memory.current": "600", "memory.stat": stat})
    assert group_bytes_left(root, own) == [1000 - 600 + 30]
    group(root / "a" / "b", "memory.max", {"most": "100", "memory.current": "170", "memory.stat": "anon 1"})
    assert group_bytes_left(root, own) == [0, 430]


def test_control_groups_of_the_first_kind(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.write_text("4:cpu,memory:/a\n3:cpuset:/\n")
    used = {"memory.usage_in_bytes": "600", "memory.stat": "total_inactive_file 50"}
    group(tmp_path / "memory" / "a", "memory.limit_in_bytes", {"most": "1000", **used})
    group(tmp_path / "memory", "memory.limit_in_bytes", {"most": str(2**63 - 4096), **used})
    assert group_bytes_left(tmp_path, own) == [450]
    assert group_bytes_left(tmp_path, tmp_path / "none") == []
