"""The registry: names, options from signatures, checks with suggestions."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import pytest

from millpond.errors import OptionError
from millpond.methods import METHODS
from millpond.registry import Registry


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


@pytest.mark.parametrize("name", METHODS.names())
def test_every_method_documents_itself(name: str) -> None:
    entry = METHODS.get(name)
    assert entry.summary.endswith(".")
    for option in entry.options.values():
        assert option.help, f"{name}.{option.name} has no help"
        assert option.checked(str(option.default), name) == option.default
