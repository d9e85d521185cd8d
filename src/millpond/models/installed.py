"""Lookup of models, of heads trained for them and of their transform files: here, and in millpond-models."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from millpond.errors import OptionError
from millpond.install_command import install_command

#: Models that come with the package millpond-models.
SEPARATE = ("pond-text", "pond-text-long")
#: What models of our own making know; they are for tests, and their answers say nothing about larger ones.
OWN = {
    "pond-recall": "a tiny model of our own making: it knows pairs of a name and a thing, and nothing else",
    "pond-text": "a tiny model of our own making: it goes on with old books, and answers no questions",
    "pond-text-long": "a tiny model of our own making: it goes on with old books, and answers no questions",
}

_HEADS = Path(__file__).parent / "heads"
#: The folder of the models that come with the package.
BUNDLED = Path(__file__).parent / "bundled"


def installed_models() -> list[str]:
    """Return the names of the installed models, sorted."""
    return sorted(config.parent.name for folder in _folders() for config in folder.glob("*/config.json"))


def installed_folder(name: str) -> Path | None:
    """Return the folder of the model of that name, or None.

    Raises:
        OptionError: the model comes with millpond-models, which is not installed.

    Example:
        >>> installed_folder("pond-recall").name
        'pond-recall'
    """
    if name not in installed_models():
        if name in SEPARATE:
            raise OptionError(f"model {name!r} is in millpond-models; install it with: {install_command('models')}")
        return None
    return next(folder / name for folder in _folders() if (folder / name / "config.json").exists())


def heads_files() -> list[Path]:
    """Return the files of trained heads and gates in the package and in millpond-models.

    Each is for one model.
    """
    folders = [_HEADS, *(place / "heads" for place in _separate())]
    return sorted(file for folder in folders for file in folder.glob("*.safetensors"))


def transform_files() -> list[Path]:
    """Return the transform files that come with millpond-models, each for one model."""
    return sorted(file for place in _separate() for file in (place / "transforms").glob("*.safetensors.xz"))


def _folders() -> list[Path]:
    """Return the folders that hold models."""
    return [BUNDLED, *_separate()]


def _separate() -> list[Path]:
    """Return the folders of the package millpond-models, or none.

    The package is located, not imported.
    """
    spec = find_spec("millpond_models")
    return [Path(place) for place in (spec.submodule_search_locations or () if spec else ())]
