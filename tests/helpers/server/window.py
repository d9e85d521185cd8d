"""A browser on the page of a server, and fixtures of both: import `server` and `window` where they are used."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.helpers.evals.browser import CHROMIUM, Browser
from tests.helpers.server.fake import FakeLLM
from tests.helpers.server.live import Live, live

in_browser = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium or google-chrome on the PATH")
IDLE = "!document.getElementById('send').disabled"


class Window(Browser):
    """A browser that may speak with one server and nobody else."""

    allowed = ""

    def _note(self, message: dict[str, Any]) -> None:
        url = message.get("params", {}).get("request", {}).get("url", "")
        if not (self.allowed and url.startswith((self.allowed, "data:"))):
            super()._note(message)

    def visit(self, url: str) -> None:
        """The page afresh; what it asks for is recorded in `sent`."""
        self.allowed = url
        self.call("Page.navigate", url="about:blank")
        self.call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete' && document.getElementById('model').textContent !== 'Millpond'")
        self.run("""(() => { const send = window.fetch; window.sent = []; window.fetch = (path, options) => {
          if (String(path).endsWith("chat/completions")) window.sent.push(JSON.parse(options.body));
          return send(path, options); }; })()""")

    def type(self, text: str) -> None:
        for letter in text:
            self.press(letter)

    def enter(self) -> None:
        shared = {"key": "Enter", "windowsVirtualKeyCode": 13}
        self.call("Input.dispatchKeyEvent", type="keyDown", text="\r", **shared)
        self.call("Input.dispatchKeyEvent", type="keyUp", **shared)

    def ask(self, text: str) -> None:
        """Type a message, send it, and wait for the answer."""
        turns = self.run("document.querySelectorAll('.assistant').length")
        self.type(text)
        self.enter()
        self.wait(f"document.querySelectorAll('.assistant').length === {turns + 1} && {IDLE}")

    def click(self, selector: str) -> None:
        """A click on the last of the elements."""
        self.run(f"[...document.querySelectorAll({selector!r})].at(-1).click()")

    def texts(self, selector: str) -> list[str]:
        """What the elements say."""
        found: list[str] = self.run(f"[...document.querySelectorAll({selector!r})].map((e) => e.textContent)")
        return found

    def messages(self) -> list[tuple[str, str]]:
        """Roles and texts of the last request."""
        return [(one["role"], one["content"]) for one in self.run("sent.at(-1).messages")]


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    with live(FakeLLM) as running:
        yield running


@pytest.fixture(scope="module")
def window(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Window]:
    with Window(tmp_path_factory.mktemp("profile")) as opened:
        yield opened
        assert opened.problems == [], opened.problems  # no exception, nothing refused, nobody else asked
