"""Commands that install millpond with an extra, and build it again; they work where this package came from."""

from __future__ import annotations

import json
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from urllib.parse import unquote, urlparse

#: Whether package registries carry millpond. All messages, and the commands in README and docs, follow from it.
PUBLISHED = False
#: Extras that are packages of this repository, with extras of their own, until they are published.
PACKAGES = {
    "models": "packages/millpond-models",
    "lab": "packages/millpond-lab",
    "eval": "packages/millpond-lab[datasets]",
    "lm-eval": "packages/millpond-lab[lm-eval]",
}


def install_command(extra: str) -> str:
    """Return the command that installs an extra into the environment of this process.

    For a checkout it names the checkout, for a wheel the folder of wheels, as far as these are known and still there.

    Example:
        >>> install_command("server").startswith("pip install ")
        True
    """
    if PUBLISHED:
        return shown_command(extra)
    checkout = _checkout()
    source = checkout or _installed_from()
    if source is None:
        return f"pip install --find-links WHEELS 'millpond[{extra}]', WHEELS: the folder of millpond's wheels"
    if source.is_file():
        return f"pip install --find-links '{source.parent}' 'millpond[{extra}]'"
    if extra in PACKAGES:
        return f"pip install '{source / PACKAGES[extra]}'"
    return f"pip install {'-e ' if checkout else ''}'{source}[{extra}]'"


def shown_command(extras: str) -> str:
    """Return the command for a reader of the documentation, in the root of a checkout.

    extras: separated by commas.
    """
    if PUBLISHED:
        return f"pip install 'millpond[{extras}]'"
    if extras not in PACKAGES:
        return f"pip install '.[{extras}]'"
    path = f"./{PACKAGES[extras]}"
    return f"pip install '{path}'" if "[" in path else f"pip install {path}"


def build_command() -> str:
    """Return the command that builds the native kernels again."""
    checkout = _checkout()
    if checkout is not None:
        return f"pip install --no-deps -e '{checkout}'"
    if PUBLISHED:
        return "pip install --force-reinstall --no-cache-dir --no-deps --no-binary millpond millpond"
    source = _installed_from()
    if source is not None and source.is_dir():
        return f"pip install --force-reinstall --no-deps '{source}'"
    return "pip install --force-reinstall --no-deps . in a checkout of millpond"


def _checkout() -> Path | None:
    """Return the checkout whose sources run, or None if they were copied into an environment."""
    return _as_checkout(Path(__file__).parents[2])


@cache
def _installed_from() -> Path | None:
    """Return the checkout or wheel that pip installed from; None if not known, or gone."""
    try:
        text = distribution("millpond").read_text("direct_url.json")  # PEP 610
        url = urlparse(json.loads(text or "{}").get("url", ""))
    except (PackageNotFoundError, ValueError):
        return None
    path = Path(unquote(url.path))
    if url.scheme != "file":
        return None
    return path if path.is_file() and path.suffix == ".whl" else _as_checkout(path)


def _as_checkout(root: Path) -> Path | None:
    return root if (root / "pyproject.toml").is_file() and (root / "CMakeLists.txt").is_file() else None
