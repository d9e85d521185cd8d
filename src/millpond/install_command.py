"""Commands that install millpond with an extra, and build it again; they work where this package came from."""

from __future__ import annotations

from pathlib import Path

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

    For a checkout it names the checkout.

    Example:
        >>> install_command("server").startswith("pip install ")
        True
    """
    if PUBLISHED:
        return shown_command(extra)
    checkout = _checkout()
    if checkout is None:
        return f"{shown_command(extra)} in the checkout that millpond was installed from"
    if extra in PACKAGES:
        return f"pip install '{checkout / PACKAGES[extra]}'"
    return f"pip install -e '{checkout}[{extra}]'"


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
    return "pip install --force-reinstall --no-deps . in the checkout that millpond was installed from"


def _checkout() -> Path | None:
    """Return the checkout whose sources run, or None if they were copied into an environment."""
    root = Path(__file__).parents[2]
    return root if (root / "pyproject.toml").is_file() and (root / "CMakeLists.txt").is_file() else None
