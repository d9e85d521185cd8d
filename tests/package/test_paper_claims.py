"""What verdicts of the page of papers follow from, on rows written here."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

DOCS = Path(__file__).parents[2] / "docs"
ALIKE = {"wiki": [0.1, 0.2, 0.3], "novel": [0.2, 0.3, 0.4]}


def module(name: str) -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(DOCS)
        return importlib.import_module(f"generated.claims.{name}")


def rows(**times: float) -> dict[str, Any]:
    """Settings whose KL is that of `ALIKE` so many times."""
    return {
        name: {text: {"kl": [time * one for one in kl], "bytes": [0.5] * 3} for text, kl in ALIKE.items()}
        for name, time in times.items()
    }


def test_examples() -> None:
    for name in ("form", "settings"):
        assert doctest.testmod(module(name)).failed == 0


@pytest.mark.parametrize(
    ("times", "verdict"),
    [
        ({"a": 1.0, "b": 2.0, "c": 3.0}, "reproduced"),
        ({"a": 3.0, "b": 2.0, "c": 1.0}, "contradicted"),
        ({"a": 2.0, "b": 3.0, "c": 1.0}, "partly"),
        ({"a": 1.0, "b": 1.0, "c": 1.0}, "no difference seen"),
    ],
)
def test_a_setting_beside_others(times: dict[str, float], verdict: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = module("settings")
    own = {"prompt": 64, "settings": rows(**times)}
    monkeypatch.setattr(settings, "read", lambda name: {"models": {"m": own}})
    found = settings.beside(("a", ("b", "c")))()
    assert found.verdict == verdict
    assert f"`a` {times['a'] * 0.25:.3f} (" in found.figure
    assert found.bytes == "50.0% and 50.0% and 50.0%"
    own["settings"]["c"]["novel"]["kl"].pop()
    assert "5 windows" in settings.beside(("a", ("b", "c")))().model, "windows that one of them lacks do not count"
    with pytest.raises(SystemExit, match=r"no rows of a"):
        settings.beside(("a", ("nobody",)))()


def test_two_measures_that_differ_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = module("settings")
    fastgen, h2o = "fastgen:threshold=0.95", "h2o@=fastgen:threshold=0.95"
    own = rows(**{h2o: 2.0, fastgen: 1.0})
    found = {"setting-texts": own, "masked-kl": rows(**{fastgen: 1.1, h2o: 2.01})}
    monkeypatch.setattr(settings, "read", lambda name: {"models": {"m": {"settings": found[name]}}})
    assert "`h2o` differs by at most 0.50%, the others by at most `fastgen` 10%" in settings.by_masks()
    assert "nats a token less than `h2o` (reproduced)" in settings.by_masks()
    found["masked-kl"][h2o]["wiki"]["kl"][0] *= 1.5
    with pytest.raises(SystemExit, match=r"differ by 50\.\d% with h2o"):
        settings.by_masks()
    found["masked-kl"] = rows(**{fastgen: 4.0, h2o: 2.0})
    with pytest.raises(SystemExit, match=r"differ about fastgen:threshold=0\.95 and h2o"):
        settings.by_masks()


@pytest.mark.parametrize(
    ("stay", "verdict"),
    [(([20, 0], [0, 20]), "reproduced"), (([15, 5], [5, 15]), "partly"), (([0, 9], [9, 0]), "contradicted")],
)
def test_heads_that_keep_their_rules(
    stay: tuple[list[int], list[int]], verdict: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = module("settings")
    pairs = [0] * 25
    pairs[0], pairs[1], pairs[5], pairs[6] = *stay[0], *stay[1]
    row = {
        "model": "m",
        "text": "wiki.txt",
        "threshold": 0.95,
        "pairs": dict.fromkeys(("all 64", "all 256", "new 256"), [pairs] * 3),
    }
    monkeypatch.setattr(settings, "read", lambda name: {"rows": [row]})
    assert settings.persistence().verdict == verdict
