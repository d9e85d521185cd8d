"""Who may import whom: the order of the parts, read from the source of every module."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "src" / "millpond"
MODULES = sorted(PACKAGE.rglob("*.py"))

#: A part imports only what stands to its left.
ORDER = [
    {
        "errors",
        "scalar",
        "budget",
        "cpu_limit",
        "install_command",
        "markdown",
        "optional",
        "option_files",
        "option_ranges",
        "peer_process",
        "registry",
    },
    {"kernels"},
    {"tiers"},
    {"codec"},
    {"policy"},
    {"methods", "presets"},
    {"plugins"},
    {"cache"},
    {"models"},
    {"hf"},
    {"inspector", "runner"},
    {"engine"},
    {"cluster", "server", "evals", "bench", "train"},
    {"cli"},
]
RANK = {part: rank for rank, parts in enumerate(ORDER) for part in parts}
#: What the benchmarks of a server share with the command line; they import no other part to their right.
SHARED = {("bench", "millpond.cli.chat_backend")}
#: Libraries and the parts that may know them. bench compares with transformers' own caches; the command line takes
#: its types and its streamer.
OUTSIDE = {
    "transformers": {"models", "hf", "inspector", "runner", "evals", "train", "bench", "cli"},
    "matplotlib": {"cli", "evals", "bench"},
    "rich": {"cli", "bench", "engine", "models", "train"},
    "typer": {"cli"},
    "triton": {"kernels"},
    "ray": {"cluster"},
    "fastapi": {"server"},
    "xgrammar": {"engine"},
    "scipy": {"engine"},
}


def part_of(module: Path) -> str:
    return module.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported(module: Path) -> Iterator[str]:
    """Full names of what a module imports, wherever in the file."""
    for node in ast.walk(ast.parse(module.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: relative import"
            if node.module == "millpond":
                yield from (f"millpond.{alias.name}" for alias in node.names)
            else:
                yield node.module or ""


@pytest.mark.parametrize("module", MODULES, ids=lambda m: str(m.relative_to(PACKAGE)))
def test_a_part_imports_only_what_stands_to_its_left(module: Path) -> None:
    part = part_of(module)
    if part in ("__init__", "__main__"):
        return
    assert part in RANK, f"{part} has no place in the order"
    for name in imported(module):
        top, _, rest = name.partition(".")
        if top == "millpond" and rest and (part, name) not in SHARED:
            other = rest.split(".")[0]
            assert other == part or other not in RANK or RANK[other] < RANK[part] or RANK[other] == RANK[part] == 0, (
                f"{part} imports {name}"
            )
        if top in OUTSIDE:
            assert part in OUTSIDE[top], f"{part} imports {top}"


def at_module_level(body: list[ast.stmt]) -> Iterator[ast.Import | ast.ImportFrom]:
    """Imports outside functions and classes, those for type checkers among them."""
    for node in body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif isinstance(node, ast.If | ast.Try):
            yield from at_module_level([*node.body, *node.orelse])


def test_no_import_circle() -> None:
    names = {
        ".".join(("millpond", *m.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__"): m
        for m in MODULES
    }
    graph: dict[str, set[str]] = {}
    for name, module in names.items():
        found: set[str] = set()
        for node in at_module_level(ast.parse(module.read_text(encoding="utf-8")).body):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            else:
                inside = {f"{node.module}.{alias.name}" for alias in node.names}
                found |= (inside & names.keys()) or {node.module or ""}
        graph[name] = (found & names.keys()) - {name, "millpond"}
    list(TopologicalSorter(graph).static_order())  # raises CycleError


PACKAGES = sorted(path.parent for path in PACKAGE.rglob("__init__.py"))


@pytest.mark.parametrize("package", PACKAGES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_every_package_says_what_it_holds(package: Path) -> None:
    doc = ast.get_docstring(ast.parse((package / "__init__.py").read_text(encoding="utf-8")))
    assert doc
    assert doc.splitlines()[0].endswith((".", "`")), doc
    modules = [file for file in package.glob("*.py") if file.stem != "__init__"]
    assert modules or list(package.glob("*/__init__.py")), "a package that holds nothing"


def test_peers_of_one_rank_do_not_import_each_other() -> None:
    for module in MODULES:
        part = part_of(module)
        for name in imported(module):
            other = name.removeprefix("millpond.").split(".")[0]
            if name.startswith("millpond.") and other != part and RANK.get(part, 0) > 0 and (part, name) not in SHARED:
                assert RANK.get(other, -1) < RANK[part], f"{module}: {name}"


def test_importing_the_package_loads_neither_torch_nor_anything_optional() -> None:
    libraries = {"torch", "numpy", "transformers", "triton", "matplotlib", "typer", "rich"}
    code = f"import sys, millpond; print(sorted({libraries} & {{*sys.modules}}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_importing_the_package_takes_no_time() -> None:
    code = "import time; start = time.perf_counter(); import millpond; print(time.perf_counter() - start)"
    runs = [subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True) for _ in range(3)]
    assert min(float(run.stdout) for run in runs) < 0.3


def test_listing_the_methods_needs_no_transformers() -> None:
    code = "import sys, millpond; millpond.list_methods(); print('transformers' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
