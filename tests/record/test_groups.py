"""Limits of control groups, read from files as Linux has them."""

from pathlib import Path

import psutil
import pytest

from stoker.record import groups, memory

GIB = 2**30
UNLIMITED = "9223372036854771712"
"""What version 1 says for no limit."""


class Machine:
    """The files of /proc/self and /sys/fs/cgroup under a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "proc").mkdir()

    def proc(self, cgroup: str, *mounts: tuple[str, str, str, str]) -> None:
        """`mounts`: the root, the mount point, the kind and its options."""
        (self.folder / "proc/cgroup").write_text(cgroup)
        lines = ["22 1 0:21 / /proc rw,relatime shared:5 - proc proc rw"]
        for root, point, kind, options in mounts:
            lines.append(
                f"35 31 0:32 {root} {self.folder}{point} rw,nosuid shared:9 master:1 - {kind} {kind} {options}"
            )
        (self.folder / "proc/mountinfo").write_text("\n".join(lines) + "\n")

    def group(self, path: str, **files: str | int) -> None:
        """Files `memory.NAME` of a group."""
        folder = self.folder / path.lstrip("/")
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (folder / f"memory.{name}").write_text(f"{text}\n")


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine(tmp_path)
    monkeypatch.setattr(groups, "_PROCESS", tmp_path / "proc")
    return made


def found() -> list[tuple[float, float]]:
    return [(limit.most / GIB, limit.left / GIB) for limit in groups.limits()]


def test_a_container_of_version_2_sees_its_group_as_the_outermost(machine: Machine) -> None:
    machine.proc("0::/\n", ("/", "/sys/fs/cgroup", "cgroup2", "rw,nsdelegate"))
    stat = f"anon {2 * GIB}\nfile {GIB}\ninactive_file {GIB // 2}\nactive_file {GIB // 4}\nslab_reclaimable 9"
    machine.group("/sys/fs/cgroup", max=4 * GIB, current=3 * GIB, stat=stat)
    assert found() == [(4, 1.75)]


def test_max_is_no_limit_and_the_outermost_group_has_no_file(machine: Machine) -> None:
    machine.proc("0::/user/job\n", ("/", "/sys/fs/cgroup", "cgroup2", "rw"))
    machine.group("/sys/fs/cgroup", stat="anon 0")
    machine.group("/sys/fs/cgroup/user", max="max", current=GIB, stat="anon 0")
    machine.group("/sys/fs/cgroup/user/job", max="max", current=GIB, stat="anon 0")
    assert found() == []


def test_every_group_around_binds_with_what_all_in_it_use(machine: Machine) -> None:
    machine.proc("0::/slurm/job/step\n", ("/", "/sys/fs/cgroup", "cgroup2", "rw"))
    machine.group("/sys/fs/cgroup/slurm", max=64 * GIB, current=60 * GIB, stat="anon 0")
    machine.group("/sys/fs/cgroup/slurm/job", max=16 * GIB, current=6 * GIB, stat=f"inactive_file {GIB}\nactive_file 0")
    machine.group("/sys/fs/cgroup/slurm/job/step", max="max", current=GIB, stat="anon 0")
    assert found() == [(16, 11), (64, 4)]


def test_version_1_of_a_container_that_sees_the_hosts_paths(machine: Machine) -> None:
    """The mount begins at the container's group, whose path in the list is the host's."""
    machine.proc(
        "9:name=systemd:/docker/ab\n4:cpuacct,memory:/docker/ab\n1:cpu:/\n0::/\n",
        ("/docker/ab", "/sys/fs/cgroup/cpu", "cgroup", "rw,cpu"),
        ("/docker/ab", "/sys/fs/cgroup/memory", "cgroup", "rw,cpuacct,memory"),
        ("/", "/sys/fs/cgroup/unified", "cgroup2", "rw"),
    )
    stat = f"active_file 7\ninactive_file 7\ntotal_active_file {GIB // 2}\ntotal_inactive_file {GIB // 2}"
    machine.group("/sys/fs/cgroup/memory", limit_in_bytes=8 * GIB, usage_in_bytes=5 * GIB, stat=stat)
    machine.group("/sys/fs/cgroup/cpu", limit_in_bytes=1, usage_in_bytes=0, stat="cache 0")
    assert found() == [(8, 4)]


def test_version_1_nested_and_unlimited(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.proc("4:memory:/a/b\n", ("/", "/sys/fs/cgroup/memory", "cgroup", "rw,memory"))
    for path in ("", "/a/b"):
        machine.group(f"/sys/fs/cgroup/memory{path}", limit_in_bytes=UNLIMITED, usage_in_bytes=GIB, stat="cache 0")
    machine.group("/sys/fs/cgroup/memory/a", limit_in_bytes=2 * GIB, usage_in_bytes=3 * GIB, stat="cache 0")
    assert found()[1] == (2, 0)  # a limit that was lowered under what is used
    assert (memory.available_bytes(), memory.total_bytes()) == (0, 2 * GIB)
    machine.group("/sys/fs/cgroup/memory/a", limit_in_bytes=UNLIMITED)
    assert memory.total_bytes() == psutil.virtual_memory().total
    assert memory.available_bytes() == pytest.approx(psutil.virtual_memory().available, rel=0.2)


@pytest.mark.parametrize("path", ["/elsewhere", "/../outside"])
def test_a_path_outside_the_mount_is_read_at_the_mount(machine: Machine, path: str) -> None:
    """A process that was started in another namespace of groups than its mounts."""
    machine.proc(f"0::{path}\n", ("/mine", "/sys/fs/cgroup", "cgroup2", "rw"))
    machine.group("/sys/fs/cgroup", max=4 * GIB, current=GIB, stat="anon 0")
    assert found() == [(4, 3)]


def test_a_system_without_groups(machine: Machine) -> None:
    assert found() == []


def test_the_files_of_this_system_can_be_read() -> None:
    assert all(limit.most > 0 and 0 <= limit.left <= limit.most for limit in groups.limits())
