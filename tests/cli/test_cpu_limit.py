"""CPUs of a process under affinity and control groups."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from millpond import cpu_limit
from millpond.cpu_limit import limit_openmp, usable_cpus


@pytest.fixture(autouse=True)
def eight_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


@pytest.mark.parametrize(
    ("quota", "cpus"), [("150000 100000", 2), ("20000 100000", 1), ("max 100000", 8), ("oddly", 8)]
)
def test_version_2(tmp_path: Path, quota: str, cpus: int) -> None:
    write(tmp_path / "groups", "0::/a/b")
    write(tmp_path / "mount/a/b/cpu.max", quota)
    assert usable_cpus(tmp_path / "groups", tmp_path / "mount") == cpus


def test_the_smallest_quota_around_it_counts(tmp_path: Path) -> None:
    write(tmp_path / "groups", "0::/a/b")
    write(tmp_path / "mount/a/b/cpu.max", "500000 100000")
    write(tmp_path / "mount/a/cpu.max", "300000 100000")
    assert usable_cpus(tmp_path / "groups", tmp_path / "mount") == 3


def test_in_a_container_the_path_is_that_of_the_host(tmp_path: Path) -> None:
    write(tmp_path / "groups", "0::/somewhere/else")
    write(tmp_path / "mount/cpu.max", "200000 100000")
    assert usable_cpus(tmp_path / "groups", tmp_path / "mount") == 2


@pytest.mark.parametrize(("quota", "cpus"), [(250000, 3), (-1, 8)])
def test_version_1(tmp_path: Path, quota: int, cpus: int) -> None:
    write(tmp_path / "groups", "5:memory:/m\n4:cpu,cpuacct:/a")
    write(tmp_path / "mount/cpu/a/cpu.cfs_quota_us", str(quota))
    write(tmp_path / "mount/cpu/a/cpu.cfs_period_us", "100000")
    assert usable_cpus(tmp_path / "groups", tmp_path / "mount") == cpus


def test_without_control_groups_the_affinity_counts(tmp_path: Path) -> None:
    assert usable_cpus(tmp_path / "none", tmp_path) == 8


def test_openmp_is_limited_unless_the_user_has_said_how_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(cpu_limit, "usable_cpus", lambda: 3)
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    limit_openmp()
    assert os.environ["OMP_NUM_THREADS"] == "5"
    monkeypatch.delenv("OMP_NUM_THREADS")
    limit_openmp()
    assert os.environ["OMP_NUM_THREADS"] == "3"


def test_the_command_line_limits_before_torch_is_there() -> None:
    code = "import sys, millpond.cpu_limit, millpond.cli; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
