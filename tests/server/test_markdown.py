"""Answers as the page shows them: Markdown, and nothing that a browser would run or fetch."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from importlib.resources import files
from typing import Any

import pytest

from millpond.errors import OptionError
from millpond.server.markdown import MOST_CHARACTERS, MOST_LINES, MOST_MARKS, render_markdown
from tests.helpers.server.fake import FakeLLM, client_of


@pytest.mark.parametrize(
    ("text", "html"),
    [
        ("**yes**, *so*\nit is", "<p><strong>yes</strong>, <em>so</em><br>\nit is</p>\n"),
        ("1. a\n2. b", "<ol>\n<li>a</li>\n<li>b</li>\n</ol>\n"),
        ("```py\nx < 1\n```", '<pre><code class="language-py">x &lt; 1\n</code></pre>\n'),
        ("```Python x=1\na\n```", '<pre><code class="language-python">a\n</code></pre>\n'),
        ("```evil\na\n```", "<pre><code>a\n</code></pre>\n"),
        ("| a |\n|---|\n| b |", "<table><thead><tr><th>a</th></tr></thead><tbody><tr><td>b</td></tr></tbody></table>"),
        ("[a](https://b.c)", '<p><a href="https://b.c" rel="noopener noreferrer nofollow">a</a></p>\n'),
    ],
)
def test_what_is_shown(text: str, html: str) -> None:
    shown = render_markdown(text)
    assert (shown.replace("\n", "") if "<table>" in html else shown) == html


@pytest.mark.parametrize(
    "text",
    [
        "<script>alert(1)</script>",
        "<img src=x onerror=alert(1)>",
        "![x](https://a.b/c.png)",
        "[x](javascript:alert(1))",
        "[x](data:text/html;base64,PHNjcmlwdD4=)",
        '[x](https://a.b "onmouseover=alert(1)")',
        "<a href='javascript:alert(1)'>x</a>",
        "`<script>`",
        "<style>*{}</style><iframe src=//a.b></iframe>",
    ],
)
def test_what_a_browser_would_run_or_fetch_is_text(text: str) -> None:
    html = render_markdown(text)
    for told in ("<script", "<img", "<style", "<iframe", 'href="javascript', 'href="data', "title="):
        assert told not in html


def test_the_page_knows_the_limits() -> None:
    script = files("millpond.server").joinpath("page", "answer.js").read_text(encoding="utf-8")
    assert f"MOST_CHARACTERS = {MOST_CHARACTERS}, MOST_MARKS = {MOST_MARKS}, MOST_LINES = {MOST_LINES};" in script


def test_it_is_rendered_by_the_server_and_bounded() -> None:
    async def work() -> list[Any]:
        async with client_of(FakeLLM()) as client:
            texts = ("**a**", "a" * (MOST_CHARACTERS + 1))
            return [await client.post("/page/markdown", json={"text": text}) for text in texts]

    fine, long = asyncio.run(work())
    assert fine.json() == {"html": "<p><strong>a</strong></p>\n"}
    assert long.status_code == 400


@pytest.mark.parametrize(
    "piece", ["[", "> ", "*a ", "`", "- ", "|a", "<", "~~", "![", "**a_", "1. ", "- a\n", "a\n\n", "|x|y|\n"]
)
def test_no_text_takes_long(piece: str) -> None:
    """What parses by the square, or has thousands of parts, is refused, and then shown as it is.

    CPU seconds of this thread: other threads of the process have nothing to do with it.
    """
    head = "|a|b|\n|-|-|\n" if "|x" in piece else ""
    text = (head + piece * MOST_CHARACTERS)[:MOST_CHARACTERS]
    began = time.thread_time()
    with suppress(OptionError):
        render_markdown(text)
    assert time.thread_time() - began < 1
    few = text.split("\n")[: MOST_LINES // (1 + piece.count("|"))]  # as many as are rendered
    began = time.thread_time()
    with suppress(OptionError):
        render_markdown("\n".join(few))
    assert time.thread_time() - began < 1
    with pytest.raises(OptionError, match="show the text as it is"):
        render_markdown("*" * (MOST_MARKS + 1))
