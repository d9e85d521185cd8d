"""Loading by a hub id where there is no network, and by the names of installed models."""

from __future__ import annotations

import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from helpers.models import needs_pond_text
from millpond.errors import OptionError
from millpond.install_command import install_command
from millpond.models import installed
from millpond.models.installed import SEPARATE, installed_models
from millpond.models.load import load_model, load_tokenizer, resolve


class DeadHub:
    """An address that takes connections and ends them without a word."""

    def __init__(self) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.address = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self.asked = 0
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            self.asked += 1
            connection.close()

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[DeadHub]:
    dead = DeadHub()
    constants = huggingface_hub.constants
    monkeypatch.setattr(constants, "ENDPOINT", dead.address)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", f"{dead.address}/{{repo_id}}/{{filename}}")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    yield dead
    dead.close()


@pytest.mark.parametrize("load", [load_model, load_tokenizer])
def test_a_hub_that_does_not_answer_is_asked_once(load: Callable[[str], Any], hub: DeadHub) -> None:
    begin = time.monotonic()
    with pytest.raises(OptionError, match=r"from the hub. \(the hub does not answer, and there is no earlier download"):
        load("nobody/nothing-of-that-name")
    assert time.monotonic() - begin < 10
    assert hub.asked == 1


def test_what_was_downloaded_earlier_is_loaded(hub: DeadHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "models--someone--pond"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("0123")
    (folder / "snapshots").mkdir()
    (folder / "snapshots" / "0123").symlink_to(resolve("pond-recall"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    assert len(load_tokenizer("someone/pond")) == len(load_tokenizer("pond-recall"))
    assert hub.asked == 1


def test_a_model_of_a_package_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installed, "find_spec", lambda name: None)
    assert installed_models() == ["pond-recall"]
    way_out = re.escape(install_command("models"))
    with pytest.raises(OptionError, match=rf"'pond-text' is in millpond-models; .* {way_out}"):
        load_model("pond-text")


@needs_pond_text
def test_models_of_both_packages() -> None:
    assert installed_models() == sorted(["pond-recall", *SEPARATE])
