"""What millpond and some of its extras need, a requirement a line: for installs that do not build the package again."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
OWN = re.compile(r"millpond\[(.*)\]")


def needed(extras: list[str]) -> list[str]:
    """The requirements of the package and of these extras, and of the extras that they name."""
    found: dict[str, None] = dict.fromkeys(PROJECT["dependencies"])
    for extra in extras:
        for requirement in PROJECT["optional-dependencies"][extra]:
            own = OWN.fullmatch(requirement)
            found |= dict.fromkeys(needed(own[1].split(",")) if own else [requirement])
    return list(found)


if __name__ == "__main__":
    print("\n".join(needed(sys.argv[1:])))
