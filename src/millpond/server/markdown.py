"""Markdown of an answer as HTML that is safe to show: CommonMark and tables, no HTML of the model's own, no images."""

from __future__ import annotations

import nh3
from markdown_it import MarkdownIt

from millpond.errors import OptionError

#: Characters of one text; marks in it (`*`, `[` ...), which without a match take time by their square; and lines and
#: cells of tables, each of which takes its time.
MOST_CHARACTERS, MOST_MARKS, MOST_LINES = 50_000, 2_000, 3_000
_MARKS = "*_~[!`"
_PARSER = MarkdownIt("commonmark", {"html": False, "breaks": True}).enable(["table", "strikethrough"]).disable("image")
_TAGS = {
    "a", "blockquote", "br", "code", "em", "h1", "h2", "h3", "h4", "h5", "h6", "hr", "li", "ol", "p", "pre", "s",
    "strong", "table", "tbody", "td", "th", "thead", "tr", "ul",
}  # fmt: skip


def render_markdown(text: str) -> str:
    """HTML of a text.

    Raises:
        OptionError: it is too long, or has too many marks, to be parsed while other requests run.

    Example:
        >>> render_markdown("**yes** <script>")
        '<p><strong>yes</strong> &lt;script&gt;</p>\\n'
    """
    marks = sum(text.count(mark) for mark in _MARKS)
    lines = text.count("\n") + text.count("\r") + text.count("|")
    if len(text) > MOST_CHARACTERS or marks > MOST_MARKS or lines > MOST_LINES:
        raise OptionError(
            f"{len(text):,} characters with {marks:,} marks, and {lines:,} lines and cells: at most "
            f"{MOST_CHARACTERS:,} with {MOST_MARKS:,} and {MOST_LINES:,} are rendered; show the text as it is"
        )
    return nh3.clean(
        _PARSER.render(text), tags=_TAGS, attributes={"*": set(), "a": {"href"}, "ol": {"start"}},
        url_schemes={"http", "https", "mailto"}, link_rel="noopener noreferrer nofollow",
    )  # fmt: skip
