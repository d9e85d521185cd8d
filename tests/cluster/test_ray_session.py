"""Who ends Ray: a process has one connection to it, whatever the number of clusters. No Ray."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from millpond.cluster import ray_worker
from millpond.cluster.ray_worker import RaySession
from millpond.errors import OptionError


class Ray:
    """In place of the module: whether this process is connected, and how often that began."""

    def __init__(self) -> None:
        self.options: list[dict[str, Any]] = []
        self.there = False
        self.error: Exception | None = None

    def is_initialized(self) -> bool:
        return self.there

    def init(self, **options: Any) -> None:
        assert not self.there, "Ray refuses to be connected twice"
        self.options.append(options)
        if self.error is not None:
            raise self.error
        self.there = True

    def shutdown(self) -> None:
        self.there = False


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Ray:
    made = Ray()
    monkeypatch.setattr(ray_worker, "require", lambda *_: made)
    monkeypatch.setattr(ray_worker, "_connection", None)
    return made


def session(address: str | None = None) -> RaySession:
    return RaySession(address, 2, 2**20)


def folder_of(ray: Ray) -> Path:
    return Path(ray.options[-1]["_temp_dir"])


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["first-closes-first", "second-closes-first"])
def test_the_last_cluster_that_closes_ends_the_private_ray(ray: Ray, order: tuple[int, int]) -> None:
    both = session(), session()
    assert len(ray.options) == 1
    both[order[0]].close()
    assert ray.there, "the other one has its workers there"
    assert folder_of(ray).exists()
    both[order[0]].close()
    assert ray.there, "to close one twice is to close it once"
    both[order[1]].close()
    assert not ray.there
    assert not folder_of(ray).exists()
    session().close()
    assert len(ray.options) == 2


def test_a_ray_of_the_program_is_left_as_it_is(ray: Ray) -> None:
    ray.init()
    first, second = session(), session("auto")
    first.close()
    second.close()
    assert ray.there


def test_clusters_of_one_process_are_on_one_ray(ray: Ray) -> None:
    """Else an address would be ignored."""
    first = session()
    with pytest.raises(OptionError, match=r"\(a private one\).*\(auto\)"):
        session("auto")
    first.close()
    second = session("auto")
    assert ray.options[-1]["address"] == "auto"
    with pytest.raises(OptionError, match=r"\(auto\).*\(a private one\)"):
        session()
    second.close()
    assert not ray.there


def test_a_ray_that_the_program_ended_is_not_ended_by_a_later_session(ray: Ray) -> None:
    first = session()
    old = folder_of(ray)
    ray.shutdown()
    second = session()
    first.close()
    assert ray.there
    assert (old.exists(), folder_of(ray).exists()) == (False, True)
    second.close()
    assert not ray.there


def test_a_ray_that_does_not_start_leaves_no_files(ray: Ray) -> None:
    ray.error = ConnectionError("no")
    with pytest.raises(OptionError, match="cannot be reached at this machine: no"):
        session()
    assert not folder_of(ray).exists()
    ray.error = None
    session().close()
