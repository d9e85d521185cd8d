"""The page of the Python names: tables that read anywhere, and a directive per name for the site's signatures."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from types import ModuleType

import millpond
import millpond.plugins
from generated.results import ROOT
from millpond.engine import outputs, request
from millpond_lab.bench.common.report import markdown_table

GROUPS = {
    "Caches for `generate()`": (
        "compress",
        "MillpondCache",
        "CacheStats",
        "Budget",
        "preset",
        "press",
        "fit",
        "save_document",
        "restore_document",
        "TextStorage",
        "calibrate_transform",
        "ask",
        "TextAnswer",
    ),
    "Engine": (
        "LLM",
        "AsyncLLM",
        "EngineConfig",
        "SamplingParams",
        "CacheOptions",
        "PromptMarks",
        "Prompt",
        "Chunk",
        "ChunkStore",
        "plan",
        "Plan",
    ),
    "Models": ("load_model", "load_tokenizer", "model_folder"),
    "Methods and number formats": ("list_methods", "list_codecs", "Policy"),
    "Errors": (
        "MillpondError",
        "OptionError",
        "BudgetError",
        "DataError",
        "UnsupportedModelError",
        "WouldForgetError",
        "CacheMismatchError",
        "NotPicklableError",
        "PoolFullError",
        "NumericsError",
    ),
}
ABOUT = {
    "Engine": "Every setting of an engine, and of the model that it loads: [settings](settings.md).",
    "Errors": "Causes and remedies are in [troubleshooting](../how-to/troubleshooting.md).",
    "Methods and number formats": "Options of each method are on [its page](methods/README.md).",
}
#: Classes that an engine takes and gives, which `millpond` has no name for.
OUTPUTS = ((request, "Request"), (outputs, "RequestOutput"), (outputs, "Completion"))
INTRO = """\
Every public name of `millpond`, and then of `millpond.plugins`.
Signatures and members are on the documentation site (`make docs`); the tables link to the source.
"""
REQUESTS = """\
What `Engine.add` takes and `Engine.step` gives; `LLM`, `AsyncLLM` and clusters give the same outputs.
Import them from the modules that the table names.
"""
PLUGINS = """\
What a method of your own builds on: [a tutorial](../tutorial/write-your-own-method.md).
"""


def api_page() -> str:
    """The page in Markdown.

    Raises:
        ValueError: a public name is in no group, or in two.
    """
    grouped = sorted(name for names in GROUPS.values() for name in names)
    if grouped != sorted(millpond.__all__):
        raise ValueError(
            f"docs/generated/api_page.py groups {grouped}, but the public names are {sorted(millpond.__all__)}"
        )
    parts = [f"# Python\n\n{INTRO}"]
    for title, names in GROUPS.items():
        about = f"{ABOUT[title]}\n\n" if title in ABOUT else ""
        parts.append(f"## {title}\n\n{about}{_section(millpond, names)}")
    parts.append(f"## Requests and outputs\n\n{REQUESTS}\n{_table_of(OUTPUTS)}")
    others = [name for name in millpond.plugins.__all__ if name not in millpond.__all__]
    parts.append(f"## `millpond.plugins`\n\n{PLUGINS}\n{_section(millpond.plugins, others)}")
    return "\n".join(parts)


def _section(module: ModuleType, names: tuple[str, ...] | list[str]) -> str:
    return _table_of([(module, name) for name in names])


def _table_of(places: Sequence[tuple[ModuleType, str]]) -> str:
    """A table of names, each with the module that it is imported from, and a directive for each."""
    rows = [(f"`{name}`", _summary(getattr(module, name)), _source(getattr(module, name))) for module, name in places]
    table = markdown_table(("name", "what it is", "source"), rows).replace("---:", "---")
    return table + "".join(f"\n::: {module.__name__}.{name}\n" for module, name in places)


def _has_doc(thing: object) -> bool:
    return inspect.isclass(thing) or inspect.isfunction(thing)  # not an alias of a type


def _summary(thing: object) -> str:
    doc = inspect.getdoc(thing) if _has_doc(thing) else ""
    return " ".join((doc or "").split("\n\n")[0].split()).replace("|", "\\|")


def _source(thing: object) -> str:
    name = getattr(thing, "__module__", "") if _has_doc(thing) else ""
    if not name:
        return ""
    folder = "packages/millpond-lab/src" if name.startswith("millpond_lab") else "src"
    path = f"{folder}/{name.replace('.', '/')}"
    file = f"{path}.py" if (ROOT / f"{path}.py").exists() else f"{path}/__init__.py"
    return f"[{name}](../../{file})"
