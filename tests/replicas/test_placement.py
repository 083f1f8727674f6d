"""Which cores replicas compute on, on machines of every shape."""

from pathlib import Path

import pytest

from inflight.contracts.api.config import EngineConfig
from inflight.engine.process.protocol import Load
from inflight.engine.replicas.launch import _load_of, best_number, check_replicas
from inflight.host import machine
from inflight.host.machine import Placement, place


def two_sockets(folder: Path, cores: int = 4) -> None:
    """A machine of two NUMA nodes with this number of cores each, of two hardware threads, numbered as on Linux."""
    for cpu in range(4 * cores):
        core = cpu % (2 * cores)
        topology = folder / f"sys/devices/system/cpu/cpu{cpu}/topology"
        topology.mkdir(parents=True)
        (topology / "thread_siblings_list").write_text(f"{core},{core + 2 * cores}\n")
        (topology.parent / f"node{core // cores}").mkdir()


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    two_sockets(tmp_path)
    monkeypatch.setattr(machine.sys, "platform", "linux")
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda process: set(range(16)), raising=False)
    return tmp_path


def test_replicas_are_spread_over_nodes_and_share_no_core(system: Path) -> None:
    assert place(2, system) == [
        Placement(0, (0, 1, 2, 3, 8, 9, 10, 11), 4),
        Placement(1, (4, 5, 6, 7, 12, 13, 14, 15), 4),
    ]
    assert [each.cpus for each in place(4, system)] == [(0, 1, 8, 9), (2, 3, 10, 11), (4, 5, 12, 13), (6, 7, 14, 15)]
    for number in range(1, 9):
        cpus = [cpu for each in place(number, system) for cpu in each.cpus]
        assert len(cpus) == len(set(cpus))
        assert len(place(number, system)) == number


def test_more_replicas_than_cores_share_them(system: Path) -> None:
    placed = place(11, system)
    assert len(placed) == 11
    assert all(len(each.cpus) == 2 and each.num_threads == 1 for each in placed)
    assert {cpu for each in placed for cpu in each.cpus} == set(range(16))


def test_only_cores_that_the_process_may_use_count(system: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda process: {0, 8, 4, 5, 6, 12})
    assert place(2, system) == [Placement(0, (0, 8), 1), Placement(1, (4, 5, 6, 12), 2)]  # threads: 4 cores, halved
    assert place(3, system)[1:] == [Placement(1, (4, 12), 1), Placement(1, (5, 6), 1)]


def test_a_quota_bounds_the_threads_of_all_together(system: Path) -> None:
    (system / "proc/self").mkdir(parents=True)
    (system / "proc/self/cgroup").write_text("0::/\n")
    group = system / "sys/fs/cgroup"
    group.mkdir(parents=True)
    (group / "cpu.max").write_text("300000 100000\n")
    assert [each.num_threads for each in place(2, system)] == [1, 1]
    assert best_number(system) == 1  # three cores' time fit one node
    (group / "cpu.max").write_text("600000 100000\n")
    assert best_number(system) == 2


def test_auto_is_one_for_each_node(system: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    assert check_replicas("auto", 1, system) == 2
    assert check_replicas("auto", 2, system) == 1  # of two ranks, one on each node
    assert check_replicas("auto", 1, tmp_path_factory.mktemp("unknown")) == 1  # nothing says where the CPUs are
    assert check_replicas(3, 1, system) == 3


@pytest.mark.parametrize("replicas", ["two", "", 0, -1, 1.5, True, None])
def test_what_is_no_number_of_replicas_is_refused(replicas: object) -> None:
    with pytest.raises(ValueError, match="replicas is"):
        check_replicas(replicas)


def test_options_that_are_given_stay_and_memory_is_shared() -> None:
    place = Placement(0, (2, 3), 2)
    given = _load_of(Load("m", None, EngineConfig(num_threads=5, kv_cache_memory=1000)), 1, place, 2)
    assert (given.config.num_threads, given.config.kv_cache.memory, given.cpus) == (5, 1000, (2, 3))
    alone = _load_of(Load("m", None, EngineConfig()), 0, place, 1).config
    shared = _load_of(Load("m", None, EngineConfig()), 0, place, 4).config
    assert alone.num_threads == shared.num_threads == 2
    assert alone.kv_cache.memory is not None
    assert shared.kv_cache.memory == alone.kv_cache.memory // 4
    assert _load_of(Load("m", None, EngineConfig(num_blocks=7)), 0, place, 4).config.kv_cache.memory is None
