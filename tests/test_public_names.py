"""The public names: sorted, complete, and documented."""

from __future__ import annotations

import importlib
import inspect

import pytest

import millpond


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


def test_methods_and_codecs_are_sorted_or_led_by_auto() -> None:
    importlib.import_module("millpond.methods.h2o")  # a package of the same name must not take the function's place
    assert millpond.methods() == sorted(millpond.methods())
    assert {"full", "h2o", "window"} <= set(millpond.methods())
    assert millpond.codecs()[0] == "auto"
