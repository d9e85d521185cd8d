"""A picture of the page for the docs: `python -m tests.helpers.server.page_picture docs/images/page.png`.

A real model, `smollm2-135m`, answers a question about a text under H2O, and one token is pointed at.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from PIL import Image

from millpond.engine.async_llm import AsyncLLM
from tests.helpers.evals.browser import Browser
from tests.helpers.server.live import live

ASKED = (
    "The mill stands at the end of the village, where the water comes down from the hills. It was built in 1734. Every "
    "morning the miller opens the gate, and the wheel begins to turn. When the pond is full, what is too much goes "
    "over the weir. The miller's daughter Anna keeps the books, and the flour is sold on Fridays.\n\nWho keeps the "
    "books?"
)
#: How it is answered: greedily and briefly.
SETTINGS = {"temperature": "0", "most": "20"}
WIDTH, HEIGHT = 1100, 620


def take(to: Path, model: str = "smollm2-135m") -> None:
    """Ask the page one thing, wait for the whole answer, and write what is in the window."""
    with (
        tempfile.TemporaryDirectory() as profile,
        live(lambda: AsyncLLM(model, method="h2o", budget="50%", kv_memory="64MiB")) as server,
        Browser(Path(profile), WIDTH, HEIGHT) as window,
    ):
        window.call("Page.navigate", url=f"{server.url}/")
        window.wait("document.readyState === 'complete' && document.getElementById('model').textContent !== 'Millpond'")
        for name, value in {**SETTINGS, "input": ASKED}.items():
            window.run(f"document.getElementById({name!r}).value = {json.dumps(value)}")
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
    with Image.open(to) as picture:  # 256 colours are enough, and a third of the bytes
        small = picture.convert("RGB").quantize(256)
    small.save(to, optimize=True)


if __name__ == "__main__":
    take(Path(sys.argv[1]))
