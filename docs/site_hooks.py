"""Hooks of the documentation site: the same Markdown reads on a Git host and as a site.

Links in the pages are relative paths in the repository. The README becomes the home page, a linked file outside of
`docs` becomes a page or a file of the site at its path in the repository, and links to either are rewritten.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
HOME = "README.md"
LINK = re.compile(r"(\]\()([^)\s#:]+)(#[^)\s]*)?(?=\))")


def site_path(path: str) -> str:
    """Where the site has a file of the repository."""
    return "index.md" if path == HOME else path.removeprefix("docs/")


def repository_path(path: str) -> str:
    """Where the repository has a file of the site."""
    return HOME if path == "index.md" else f"docs/{path}" if (ROOT / "docs" / path).exists() else path


def target(page: str, link: str) -> str:
    """The file that a link of a page leads to, both as paths in the repository."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(page), link))


def linked(page: str) -> set[str]:
    """The files that a page of the repository links to."""
    if not page.endswith(".md"):
        return set()
    found = {target(page, match[2]) for match in LINK.finditer((ROOT / page).read_text(encoding="utf-8"))}
    return {path for path in found if (ROOT / path).is_file()}


def outside(pages: set[str]) -> set[str]:
    """The files outside of `docs` that these pages lead to, and those that they lead to in turn."""
    seen, new = set[str](), pages
    while new:
        seen |= new
        new = {path for page in new for path in linked(page)} - seen
    return {path for path in seen if not path.startswith("docs/")}


def rewrite(text: str, page: str) -> str:
    """Markdown of a page of the repository with links as the site has them."""
    here = posixpath.dirname(site_path(page))

    def moved(match: re.Match[str]) -> str:
        path = target(page, match[2])
        if not (ROOT / path).is_file():
            return match[0]
        return f"{match[1]}{posixpath.relpath(site_path(path), here or '.')}{match[3] or ''}"

    return LINK.sub(moved, text)


def on_config(config: MkDocsConfig) -> None:
    """Give a folder of the navigation every page in it, its README first."""
    for entry in config.nav or ():
        for title, value in entry.items():
            if isinstance(value, str) and value.endswith("/"):
                folder = Path(config.docs_dir) / value
                names = sorted((page.stem for page in folder.glob("*.md")), key=lambda name: (name != "README", name))
                entry[title] = [value + "README.md", *({name: f"{value}{name}.md"} for name in names[1:])]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the home page, the pages of the project and whatever else the pages link to."""
    from mkdocs.structure.files import File, InclusionLevel

    in_nav = set(leaves(config.nav))
    pages = {repository_path(file.src_uri) for file in files.documentation_pages()}
    top = {path for path in in_nav if (ROOT / path).is_file()}
    for path in sorted(outside(pages | top | {HOME})):
        uri = site_path(path)
        file = File.generated(config, uri, abs_src_path=str(ROOT / path))
        file.inclusion = InclusionLevel.INCLUDED if uri in in_nav else InclusionLevel.NOT_IN_NAV
        files.append(file)
    return files


def leaves(nav: Any) -> list[str]:
    """The paths of a navigation, in its order."""
    if isinstance(nav, str):
        return [nav]
    return [path for item in (nav.values() if isinstance(nav, dict) else nav or ()) for path in leaves(item)]


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Rewrite the links of a page."""
    return rewrite(markdown, repository_path(page.file.src_uri))
