"""The Markdown of generated pages: their note, parts that are filled, figures in sentences, cells of tables."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from generated.row_figures import FigureError, is_committed, row_figure, whole

NOTE = "<!-- written by docs/generate.py; edit the code instead -->\n"
#: A figure in a sentence that is written by hand: its name and its format stand before it.
FIGURE = re.compile(r"<!-- (\S[^>]*) (\S+) -->[^<]*<!-- / -->")


def fill(text: str, name: str, content: str) -> str:
    """`text` with the part between `<!-- name -->` and `<!-- /name -->` replaced."""
    begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    if begin not in text or end not in text:
        raise SystemExit(f"a page lacks {begin} ... {end}")
    return re.sub(f"{begin}.*?{end}", lambda _: f"{begin}\n{content}\n{end}", text, flags=re.DOTALL)


def fill_all(text: str, contents: Mapping[str, str]) -> str:
    """`text` with several parts filled, by their names."""
    for name, content in contents.items():
        text = fill(text, name, content)
    return text


def fill_figures(text: str, figures: Mapping[str, float]) -> str:
    """`text` with what stands between `<!-- name format -->` and `<!-- / -->` replaced by the figure of that name.

    A name is one of `figures`, or a file of committed rows and where in it the figure is
    (`generated.row_figures`).

    Raises:
        SystemExit: a mark cannot be read, or no figure has its name.
    """

    before = ""

    def shown(found: re.Match[str]) -> str:
        nonlocal before
        name, form = found.groups()
        try:
            if name in figures:
                return f"<!-- {name} {form} -->{in_form(figures[name], form)}<!-- / -->"
            full = whole(name, before)
            if is_committed(full):
                before = full
                return f"<!-- {name} {form} -->{in_form(row_figure(full), form)}<!-- / -->"
        except FigureError as wrong:
            raise SystemExit(f"the figure {name!r}: {wrong}") from wrong
        alike = ", ".join(sorted(known for known in figures if known.split()[0] == name.split()[0])[:8])
        raise SystemExit(f"no figure is named {name!r}; some that begin so: {alike or 'none'}")

    filled, count = FIGURE.subn(shown, text)
    if count != text.count("<!-- / -->"):
        raise SystemExit(
            f"{text.count('<!-- / -->')} figures end and {count} begin; write <!-- name .3f -->0<!-- / -->"
        )
    return filled


def in_form(figure: float, form: str) -> str:
    """A figure in a format; one that is rounded to zero has no minus.

    Raises:
        FigureError: no format of numbers.
    """
    try:
        text = f"{figure:{form}}"
    except ValueError as wrong:
        raise FigureError(f"{form!r} is no format of numbers, such as .2f or ,.0f") from wrong
    return text if re.search(r"[1-9]", text) else text.replace("-", "")


def by_hand(*places: Path) -> list[Path]:
    """The pages among these files and below these folders that no command writes whole."""
    pages = [page for place in places for page in ([place] if place.is_file() else place.rglob("*.md"))]
    return sorted(page for page in pages if "<!-- written by" not in page.read_text(encoding="utf-8")[:100])


def cell(text: str) -> str:
    """Text that may stand in a Markdown table."""
    return text.replace("|", "\\|")


def left(table: str) -> str:
    """A table whose columns all stand to the left."""
    return table.replace("---:", "---")
