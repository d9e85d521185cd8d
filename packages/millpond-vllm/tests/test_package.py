"""What the package imports, and how large its files are."""

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "millpond_vllm"
MODULES = sorted(SOURCE.rglob("*.py"))
#: All of Millpond that the package may know.
PUBLIC = {"millpond", "millpond.plugins"}


def imported(module: Path) -> set[str]:
    """Modules that a file imports, at its top or inside functions."""
    found = set()
    for node in ast.walk(ast.parse(module.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return found


@pytest.mark.parametrize("module", MODULES, ids=lambda module: str(module.relative_to(SOURCE)))
def test_only_millpond_s_public_names_are_imported(module):
    own = {name for name in imported(module) if name == "millpond" or name.startswith("millpond.")}
    assert own <= PUBLIC


def test_files_are_one_concept_each():
    assert {module.name: lines for module in MODULES if (lines := len(module.read_text().splitlines())) > 400} == {}


def test_modules_that_need_no_vllm_do_not_import_it():
    free = ("event_times", "settings", "methods", "planning", "cache_layout", "row_compaction", "messages", "compat")
    for name in free:
        tree = ast.parse((SOURCE / f"{name}.py").read_text(encoding="utf-8"))
        top = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
        named = {getattr(node, "module", None) or node.names[0].name for node in top}
        assert not any(one == "vllm" or one.startswith("vllm.") for one in named), name
