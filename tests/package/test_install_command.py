"""Commands that messages, README and docs name: they install from where the package came from."""

from __future__ import annotations

from pathlib import Path

import pytest

from millpond import install_command as commands

ROOT = Path(__file__).parents[2]


def test_in_a_checkout_the_checkout_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "_checkout", lambda: ROOT)
    assert commands.install_command("server") == f"pip install -e '{ROOT}[server]'"
    assert commands.install_command("models") == f"pip install '{ROOT}/packages/millpond-models'"
    assert commands.install_command("lm-eval") == f"pip install '{ROOT}/packages/millpond-lab[lm-eval]'"
    assert commands.shown_command("eval") == "pip install './packages/millpond-lab[datasets]'"
    for path in commands.PACKAGES.values():
        assert (ROOT / path.partition("[")[0] / "pyproject.toml").is_file()
    assert commands.build_command() == f"pip install --no-deps -e '{ROOT}'"


def test_elsewhere_the_reader_is_sent_to_the_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "_checkout", lambda: None)
    assert commands.install_command("server").startswith("pip install '.[server]' in the checkout")


def test_once_published_the_registry_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "PUBLISHED", True)
    assert commands.install_command("server") == "pip install 'millpond[server]'"
    assert commands.shown_command("models") == "pip install 'millpond[models]'"


@pytest.mark.skipif(commands.PUBLISHED, reason="the package is published")
def test_no_page_and_no_message_names_a_registry_before() -> None:
    texts = [ROOT / "README.md", *(ROOT / "docs").glob("how-to/*.md"), *(ROOT / "src").rglob("*.py")]
    own = Path(commands.__file__)
    named = [path for path in texts if path != own and "pip install 'millpond[" in path.read_text(encoding="utf-8")]
    assert named == []
