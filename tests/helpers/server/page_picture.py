"""A picture of the page for the docs: `python -m tests.helpers.server.page_picture docs/images/page.png`.

The bundled `pond-text` goes on with the beginning of a text under H2O, and one token is pointed at.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from millpond.engine.async_llm import AsyncLLM
from tests.helpers.evals.browser import Browser
from tests.helpers.server.live import live

BEGINNING = (
    "The mill stood at the end of the village, where the water came down from the hills. Every morning the miller "
    "opened the gate, and the wheel began to turn. He had a daughter, and she knew the water better than he did: when "
    "it was high after the rain, and when it was low, and how much of it the wheel could use. What was too much she "
    "let go over the weir. One evening a stranger came to the door, and said that"
)
#: How it is answered: greedily and briefly.
SETTINGS = {"temperature": "0", "most": "24"}
WIDTH, HEIGHT = 1100, 620


def take(to: Path, model: str = "pond-text", beginning: str = BEGINNING) -> None:
    """Ask the page one thing, wait for the whole answer, and write what is in the window."""
    with (
        tempfile.TemporaryDirectory() as profile,
        live(lambda: AsyncLLM(model, method="h2o", budget="40%", kv_memory="64MiB")) as server,
        Browser(Path(profile), WIDTH, HEIGHT) as window,
    ):
        window.call("Page.navigate", url=f"{server.url}/")
        window.wait("document.readyState === 'complete' && document.getElementById('model').textContent !== 'Millpond'")
        for name, value in {**SETTINGS, "input": beginning}.items():
            window.run(f"document.getElementById({name!r}).value = {value!r}")
        window.run("document.getElementById('send').click()")
        window.wait("document.querySelector('.assistant') !== null && !document.getElementById('send').disabled", 60)
        window.wait("document.querySelectorAll('#text .t').length > 40")
        held = "[...document.querySelectorAll('#log > .turn > *')].every((p) => p.scrollHeight <= p.clientHeight)"
        assert window.run(held), "a text is longer than its box"
        looks = "[...document.querySelectorAll('#text .t')].map((t) => t.className).join()"
        before = window.run(looks)
        key = "{key: 'ArrowDown', altKey: true, bubbles: true}"
        window.run(f"document.dispatchEvent(new KeyboardEvent('keydown', {key}))")
        window.wait(f"{looks} !== {before!r}")  # the next layer remembers something else
        window.run("document.getElementById('text').focus()")
        for _ in range(6):
            window.press("ArrowRight")
        window.picture(to)


if __name__ == "__main__":
    take(Path(sys.argv[1]))
