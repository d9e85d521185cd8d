"""Markdown of an answer as HTML that is safe to show: CommonMark and tables, no HTML of the model's own, no images."""

from __future__ import annotations

import nh3
from markdown_it import MarkdownIt
from markdown_it.rules_core import StateCore

from millpond.errors import OptionError

#: Characters of one text; marks in it (`*`, `[` ...), which without a match take time by their square; and lines and
#: cells of tables, each of which takes its time.
MOST_CHARACTERS, MOST_MARKS, MOST_LINES = 50_000, 2_000, 3_000
_MARKS = "*_~[!`"
#: Languages that a fence may name, of which the page's highlight.js knows the words.
LANGUAGES = (
    "c",
    "cc",
    "cpp",
    "c++",
    "cs",
    "csharp",
    "cuda",
    "dart",
    "go",
    "golang",
    "java",
    "javascript",
    "js",
    "jsx",
    "kotlin",
    "kt",
    "php",
    "rs",
    "rust",
    "scala",
    "swift",
    "ts",
    "tsx",
    "typescript",
    "zig",
    "py",
    "python",
    "python3",
    "bash",
    "console",
    "dockerfile",
    "make",
    "makefile",
    "sh",
    "shell",
    "zsh",
    "sql",
    "json",
    "jsonc",
    "json5",
    "ini",
    "toml",
    "yaml",
    "yml",
    "css",
    "scss",
    "html",
    "svg",
    "xml",
    "diff",
    "patch",
)
_CLASSES = {"code": {f"language-{name}" for name in LANGUAGES}}


def _name_languages(state: StateCore) -> None:
    """Leave of a fence's info only the name of the language, where it is known."""
    for token in state.tokens:
        if token.type == "fence":
            first = token.info.split(maxsplit=1)[:1]
            token.info = first[0].lower() if first and first[0].lower() in LANGUAGES else ""


_PARSER = MarkdownIt("commonmark", {"html": False, "breaks": True}).enable(["table", "strikethrough"]).disable("image")
_PARSER.core.ruler.push("languages", _name_languages)
_TAGS = {
    "a",
    "blockquote",
    "br",
    "code",
    "em",
    "h1",
    "h2",
    "h3",
    "h4",
    "h5",
    "h6",
    "hr",
    "li",
    "ol",
    "p",
    "pre",
    "s",
    "strong",
    "table",
    "tbody",
    "td",
    "th",
    "thead",
    "tr",
    "ul",
}


def render_markdown(text: str) -> str:
    r"""Return a text as HTML.

    Raises:
        OptionError: it is too long, or has too many marks, to be parsed while other requests run.

    Example:
        >>> render_markdown("**yes** <script>")
        '<p><strong>yes</strong> &lt;script&gt;</p>\n'
    """
    marks = sum(text.count(mark) for mark in _MARKS)
    lines = text.count("\n") + text.count("\r") + text.count("|")
    if len(text) > MOST_CHARACTERS or marks > MOST_MARKS or lines > MOST_LINES:
        raise OptionError(
            f"{len(text):,} characters with {marks:,} marks, and {lines:,} lines and cells: at most "
            f"{MOST_CHARACTERS:,} with {MOST_MARKS:,} and {MOST_LINES:,} are rendered; show the text as it is"
        )
    return nh3.clean(
        _PARSER.render(text),
        tags=_TAGS,
        attributes={"*": set(), "a": {"href"}, "ol": {"start"}},
        allowed_classes=_CLASSES,
        url_schemes={"http", "https", "mailto"},
        link_rel="noopener noreferrer nofollow",
    )
