"""Kept texts: what users and their programs know by name. Options of commands, /openapi.json, metrics, public names."""

from __future__ import annotations

import asyncio
import importlib.metadata
import inspect
import json
from collections.abc import Iterator
from typing import Any

import httpx
import typer.main

import millpond as mp
from millpond import plugins
from millpond.cli.app import app
from millpond.methods import METHODS
from millpond.server.app import create_app
from millpond.server.settings import ServerSettings
from tests.helpers.formats.model import DATA
from tests.helpers.server.fake_cluster import FakeCluster

FOLDER = DATA / "texts"
VERSIONS = FOLDER / "versions.json"
#: Whose versions take part in a text.
SCHEMAS = ("fastapi", "pydantic")


def texts() -> dict[str, str]:
    """Every text by the name of its file."""
    server = create_app(FakeCluster(), ServerSettings(api_keys=("one",)))
    return {
        "commands.txt": "\n".join(_commands()) + "\n",
        "openapi.json": json.dumps(server.openapi(), sort_keys=True, separators=(",", ":")) + "\n",
        "metrics.txt": asyncio.run(_metrics(server)),
        "names.txt": "\n".join(_names()) + "\n",
        "methods.txt": "\n".join(_methods()) + "\n",
    }


def versions() -> dict[str, str]:
    """Of the packages that write the schemas of /openapi.json."""
    return {name: importlib.metadata.version(name) for name in SCHEMAS}


def _commands() -> Iterator[str]:
    """Every command with its help and its options, as they are declared: how wide a terminal is does not matter."""
    for name, command in _below("millpond", typer.main.get_command(app)):
        yield f"== {name}: {' '.join((command.help or '').split())}"
        for option in command.params:
            default = None if callable(option.default) else option.default
            shown = [", ".join(option.opts + option.secondary_opts), "required" if option.required else ""]
            shown.append("" if default is None else f"[{default}]")
            yield f"{' '.join(filter(None, shown))} | {' '.join((getattr(option, 'help', '') or '').split())}"


def _below(name: str, command: Any) -> Iterator[tuple[str, Any]]:
    yield name, command
    for child, found in getattr(command, "commands", {}).items():
        yield from _below(f"{name} {child}", found)


async def _metrics(server: Any) -> str:
    """Names, types and texts of all metrics."""
    headers = {"authorization": "Bearer one"}
    async with httpx.AsyncClient(transport=httpx.ASGITransport(server), base_url="http://localhost") as client:
        found = await client.get("/metrics", headers=headers)
    assert found.status_code == 200, found.text
    lines = {line for line in found.text.splitlines() if line.startswith("#") and "_created " not in line}
    return "\n".join(sorted(lines)) + "\n"


def _names() -> Iterator[str]:
    """The public names, with the names of their parameters."""
    for package, names in (("millpond", dir(mp)), ("millpond.plugins", plugins.__all__)):
        module = mp if package == "millpond" else plugins
        for name in names:
            found = getattr(module, name)
            yield f"{package}.{name}" + ("" if found is mp.MillpondCache else _parameters(found))  # `compress` makes it
    for point in importlib.metadata.distribution("millpond").entry_points:
        yield f"{point.group}: {point.name}"


def _parameters(found: Any) -> str:
    """Names of what is given to a function or class, stars and all; empty where Python does not say."""
    try:
        of = inspect.signature(found)
    except (TypeError, ValueError):
        return ""
    return f"({', '.join(str(one.replace(annotation=one.empty, default=one.empty)) for one in of.parameters.values())})"


def _methods() -> Iterator[str]:
    """Methods with their options, number formats."""
    for name in mp.list_methods():
        options = METHODS.get(name).options.values()
        yield f"{name}: {', '.join(f'{one.name}={one.default!r}' for one in options)}"
    yield f"formats: {', '.join(mp.list_codecs())}"
