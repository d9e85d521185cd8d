"""The registry: names, options from signatures, checks with suggestions."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest

from millpond import registry as registry_module
from millpond.errors import OptionError
from millpond.install_command import install_command
from millpond.methods import METHODS
from millpond.registry import Registry

#: A module that adds a builder.
ADDS = "from our_woods import WOODS\n@WOODS.register('{0}')\ndef build() -> str:\n    return '{0}'\n"


@pytest.fixture
def registry() -> Registry[dict[str, Any]]:
    made: Registry[dict[str, Any]] = Registry("thing", "millpond.methods")
    made._walked = True

    @made.register("stone", paper="arXiv:1")
    def stone(
        weight: Annotated[int, "kilograms"] = 3,
        share: Annotated[int | float, "of the whole"] = 0.5,
        colour: Annotated[Literal["grey", "red"], "what it looks like"] = "grey",
        wet: Annotated[bool, "just out of the water"] = False,
        name: Annotated[str | None, "if it has one"] = None,
    ) -> dict[str, Any]:
        """A stone.

        More about stones.
        """
        return {"weight": weight, "share": share, "colour": colour, "wet": wet, "name": name}

    return made


def test_options_come_from_the_signature(registry: Registry[Any]) -> None:
    entry = registry.get("stone")
    assert (entry.summary, entry.paper) == ("A stone.", "arXiv:1")
    weight, share, colour, *_ = entry.options.values()
    assert (weight.name, weight.default, weight.help, weight.type_name) == ("weight", 3, "kilograms", "int")
    assert share.type_name == "int or float"
    assert (colour.choices, colour.type_name) == (("grey", "red"), "grey | red")


def test_text_becomes_what_the_option_is(registry: Registry[Any]) -> None:
    built = registry.get("stone")(weight="7", share="0.25", colour="red", wet="yes", name="Bob")
    assert built == {"weight": 7, "share": 0.25, "colour": "red", "wet": True, "name": "Bob"}
    count = registry.get("stone")(share="128")["share"]
    assert (count, type(count)) == (128, int)


@pytest.mark.parametrize(
    ("option", "value"),
    [("weight", "heavy"), ("weight", 1.5), ("weight", True), ("share", "nan"), ("colour", "blue"), ("wet", "maybe")],
)
def test_values_that_do_not_fit(registry: Registry[Any], option: str, value: object) -> None:
    with pytest.raises(OptionError, match=f"stone: {option}="):
        registry.get("stone")(**{option: value})


def test_unknown_names_and_options_come_with_a_suggestion(registry: Registry[Any]) -> None:
    with pytest.raises(OptionError, match=r"unknown thing 'stonne'; did you mean 'stone'\?"):
        registry.get("stonne")
    with pytest.raises(OptionError, match=r"unknown option of stone 'weigth'; did you mean 'weight'\?"):
        registry.get("stone")(weigth=1)


def test_a_name_is_given_once(registry: Registry[Any]) -> None:
    with pytest.raises(OptionError, match="registered twice"):
        registry.register("stone")(lambda: {})


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[str]]:
    """A package of builders, and another one that adds one under a group of its own; the groups that are asked for."""
    asked: list[str] = []

    def points(group: str) -> list[EntryPoint]:
        asked.append(group)
        return [EntryPoint("plank", "their_planks", group)] if group == "our.woods" else []

    (tmp_path / "our_woods").mkdir()
    (tmp_path / "our_woods" / "__init__.py").write_text(
        "from millpond.registry import Registry\n"
        "WOODS = Registry('wood', __name__, group='our.woods', extras={'lab': ['plank', 'veneer'], 'gpu': ['chip']})\n"
    )
    (tmp_path / "our_woods" / "beam.py").write_text(ADDS.format("beam"))
    (tmp_path / "their_planks.py").write_text(ADDS.format("plank"))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(registry_module, "entry_points", points)
    yield asked
    for name in ("our_woods", "our_woods.beam", "their_planks"):
        sys.modules.pop(name, None)


def test_a_group_has_another_name_than_the_package(installed: list[str]) -> None:
    woods: Registry[str] = importlib.import_module("our_woods").WOODS
    assert woods.names() == ["beam", "plank"]
    assert woods.get("plank")() == "plank"
    assert installed == ["our.woods"]
    Registry[Any]("method", "millpond.methods").names()
    assert installed == ["our.woods", "millpond.methods"], "by default that of the package"


def test_an_unknown_name_says_what_an_extra_adds(installed: list[str]) -> None:
    """Those that are there already are not named."""
    woods: Registry[str] = importlib.import_module("our_woods").WOODS
    with pytest.raises(OptionError) as refused:
        woods.get("bean")
    assert str(refused.value) == (
        f"unknown wood 'bean'; did you mean 'beam'? Known: beam, plank; in millpond-lab ({install_command('lab')}): "
        f"veneer; in millpond-gpu ({install_command('gpu')}): chip"
    )
    with pytest.raises(OptionError, match=r"wood 'veneer' is in millpond-lab; install it with: pip install"):
        woods.get("veneer")


@pytest.mark.parametrize("name", METHODS.names())
def test_every_method_documents_itself(name: str) -> None:
    entry = METHODS.get(name)
    assert entry.summary.endswith(".")
    for option in entry.options.values():
        assert option.help, f"{name}.{option.name} has no help"
        assert option.checked(str(option.default), name) == option.default
