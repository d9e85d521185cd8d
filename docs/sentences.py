"""One sentence per line in Markdown: `python docs/sentences.py` rewrites the pages that are written by hand.

Code, tables, headings, comments and HTML stay.
"""

from __future__ import annotations

from pathlib import Path

from millpond_lab.markdown import one_per_line

ROOT = Path(__file__).parent.parent
FOLDERS = ("docs", "benchmarks", "examples", ".github")


def by_hand() -> list[Path]:
    """The Markdown pages of the repository that nothing generates."""
    pages = [*ROOT.glob("*.md"), *(page for folder in FOLDERS for page in (ROOT / folder).rglob("*.md"))]
    return sorted(page for page in pages if "results" not in page.parts and not _generated(page))


def _generated(page: Path) -> bool:
    return "<!-- written by" in page.read_text(encoding="utf-8")[:100]


def main() -> None:
    """Rewrite the pages."""
    for page in by_hand():
        text = page.read_text(encoding="utf-8")
        if (new := one_per_line(text)) != text:
            page.write_text(new, encoding="utf-8")
            print(page.relative_to(ROOT))


if __name__ == "__main__":
    main()
