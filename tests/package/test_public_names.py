"""The public names: sorted, complete, and documented."""

from __future__ import annotations

import importlib
import inspect

import pytest

import millpond
from millpond import plugins


def test_all_is_sorted_without_repetition() -> None:
    assert millpond.__all__ == sorted(set(millpond.__all__))


@pytest.mark.parametrize("name", millpond.__all__)
def test_every_name_is_there_and_documented(name: str) -> None:
    assert inspect.getdoc(getattr(millpond, name))


def test_nothing_else_is_public() -> None:
    ours = {
        name
        for name, value in vars(millpond).items()
        if not name.startswith("_")
        and not inspect.ismodule(value)
        and getattr(value, "__module__", "").startswith("millpond")
    }
    assert ours <= set(millpond.__all__)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        millpond.nothing  # noqa: B018


def test_completion_shows_the_public_names_and_nothing_else() -> None:
    importlib.import_module("millpond.engine.llm")  # subpackages become attributes when they are imported
    assert dir(millpond) == millpond.__all__


def test_the_packages_of_methods_and_codecs_are_packages() -> None:
    methods = importlib.import_module("millpond.methods")
    assert millpond.methods is methods
    assert callable(methods.method)


@pytest.mark.parametrize("name", plugins.__all__)
def test_every_name_for_plugins_is_there_and_sorted(name: str) -> None:
    assert getattr(plugins, name) is not None
    assert plugins.__all__ == sorted(plugins.__all__)


def test_methods_and_codecs_are_sorted_or_led_by_auto() -> None:
    assert millpond.list_methods() == sorted(millpond.list_methods())
    assert {"full", "h2o", "window"} <= set(millpond.list_methods())
    assert millpond.list_codecs()[0] == "auto"
