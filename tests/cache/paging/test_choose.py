"""Paging rules by name: of this package, of another one, and none at all."""

from __future__ import annotations

import pytest

from millpond.cache.chunks.store import ChunkStore
from millpond.cache.paging import PAGING, list_paging_rules
from millpond.cache.paging.choose import rule_name, rule_named
from millpond.engine.config import EngineConfig
from millpond.errors import DataError, OptionError
from millpond.install_command import install_command

#: What the package has by itself.
OWN = ("learned", "lru")


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No other package adds a rule."""
    monkeypatch.setattr(PAGING, "_entries", {name: PAGING.get(name) for name in OWN})


def test_rules_by_name() -> None:
    assert rule_named(False) is None
    assert [rule_name(choice) for choice in (True, False, "lfu")] == ["lru", None, "lfu"]
    lru = rule_named(True)
    assert lru is not None
    assert lru.name == "lru"


def test_what_is_refused_by_name() -> None:
    with pytest.raises(OptionError, match="unknown paging rule 'leraned'; did you mean 'learned'"):
        rule_named("leraned")
    with pytest.raises(OptionError, match=r"only a replay does .*choose one of craft, learned, .*lru"):
        rule_named("belady")
    with pytest.raises(OptionError, match="'lru' predicts nothing; leave pager out"):
        rule_named(True, "pager.safetensors")
    with pytest.raises(OptionError, match="needs a prefix cache that predicts"):
        rule_named(False, "pager.safetensors")
    with pytest.raises(DataError, match=r"pager no\.safetensors: cannot be read"):
        rule_named("learned", "no.safetensors")


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("name", ["lfu", "marker", "mark0", "mark_predict"])
def test_a_rule_of_the_lab_names_its_package(name: str, tmp_path: object) -> None:
    for choose in (
        rule_named,
        lambda rule: EngineConfig(prefix_cache=rule),
        lambda rule: ChunkStore(tmp_path, rule=rule),
    ):
        with pytest.raises(OptionError) as refused:
            choose(name)
        assert str(refused.value) == (
            f"paging rule {name!r} is in millpond-lab; install it with: {install_command('lab')}"
        )


@pytest.mark.usefixtures("alone")
def test_the_package_has_two_rules_and_says_where_more_are() -> None:
    assert list_paging_rules() == list(OWN)
    with pytest.raises(OptionError) as refused:
        rule_named("lruu")
    assert str(refused.value) == (
        "unknown paging rule 'lruu'; did you mean 'lru'? Known: learned, lru; in millpond-lab "
        f"({install_command('lab')}): lfu, mark0, mark_predict, marker"
    )
