"""What millpond and some of its extras need, a requirement a line: for installs that do not build the package again."""

from __future__ import annotations

import re
import sys
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
#: The packages of this repository, which are installed from it.
OWN = {"millpond": ROOT, "millpond-lab": ROOT / "packages" / "millpond-lab"}
REQUIREMENT = re.compile(r"(millpond(?:-lab)?)(?:\[(.*)\])?")


@cache
def project(package: str) -> dict[str, Any]:
    """The `project` table of a package of this repository."""
    table: dict[str, Any] = tomllib.loads((OWN[package] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return table


def needed(package: str, extras: list[str]) -> list[str]:
    """What a package and these extras need from elsewhere, through what they name of this repository."""
    requirements = list(project(package)["dependencies"])
    for extra in extras:
        requirements += project(package)["optional-dependencies"][extra]
    found: dict[str, None] = {}
    for requirement in requirements:
        own = REQUIREMENT.fullmatch(requirement)
        found |= dict.fromkeys(needed(own[1], own[2].split(",") if own[2] else []) if own else [requirement])
    return list(found)


if __name__ == "__main__":
    print("\n".join(needed("millpond", sys.argv[1:])))
