"""What this process may use of its machine."""

from pathlib import Path

import pytest

from inflight.host import machine
from inflight.host.machine import free_memory, usable_cores, usable_memory


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine of four cores with two threads each, of which this process may use the first six threads."""
    monkeypatch.setattr(machine.sys, "platform", "linux")
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda process: set(range(6)), raising=False)
    for cpu in range(8):
        write(tmp_path / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list", f"{cpu % 4},{cpu % 4 + 4}")
    return tmp_path


def write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"{text}\n")


def test_a_core_has_one_thread(system: Path) -> None:
    assert usable_cores(system) == 4


def test_cores_that_no_file_describes_count(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda process: {0, 3, 5}, raising=False)
    assert usable_cores(tmp_path) == 3


@pytest.mark.parametrize(
    ("limit", "number"), [("150000 100000", 1), ("50000 100000", 1), ("max 100000", 4), ("300 100", 3)]
)
def test_a_quota_is_kept_within(system: Path, limit: str, number: int) -> None:
    write(system / "proc/self/cgroup", "0::/pod/engine")
    write(system / "sys/fs/cgroup/pod/engine/cpu.max", "max 100000")
    write(system / "sys/fs/cgroup/pod/cpu.max", limit)
    assert usable_cores(system) == number


def test_the_least_of_several_quotas_counts(system: Path) -> None:
    write(system / "proc/self/cgroup", "0::/")
    write(system / "sys/fs/cgroup/cpu.max", "250000 100000")
    assert usable_cores(system) == 2


@pytest.mark.parametrize(("quota", "number"), [("200000", 2), ("-1", 4)])
def test_quotas_of_the_first_version_count(system: Path, quota: str, number: int) -> None:
    write(system / "proc/self/cgroup", "9:memory:/a\n4:cpu,cpuacct:/docker/1\n0::/")
    group = system / "sys/fs/cgroup/cpu,cpuacct"  # in a container, where its own group is the root
    write(group / "cpu.cfs_quota_us", quota)
    write(group / "cpu.cfs_period_us", "100000")
    assert usable_cores(system) == number


@pytest.mark.parametrize("text", ["", "0::/\n", "nonsense", "0::/a", "4:cpu:/a"])
def test_what_cannot_be_read_limits_nothing(system: Path, text: str) -> None:
    write(system / "proc/self/cgroup", text)
    for file in ("cpu.max", "a/cpu.max", "cpu/a/cpu.cfs_quota_us"):
        write(system / "sys/fs/cgroup" / file, "what?")
    assert usable_cores(system) == 4


def test_free_memory_is_what_machine_and_container_leave(tmp_path: Path) -> None:
    assert free_memory(tmp_path) == usable_memory(tmp_path)
    write(tmp_path / "proc/meminfo", "MemTotal:       16384 kB\nMemAvailable:     100 kB")
    assert free_memory(tmp_path) == 100 * 1024
    write(tmp_path / "sys/fs/cgroup/memory.max", "80000")
    write(tmp_path / "sys/fs/cgroup/memory.current", "50000")
    write(tmp_path / "sys/fs/cgroup/memory.stat", "anon 20000\ninactive_file 10000")
    assert free_memory(tmp_path) == 40_000
    write(tmp_path / "sys/fs/cgroup/memory.max", "max")
    assert free_memory(tmp_path) == 100 * 1024
