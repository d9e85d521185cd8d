"""Who may import whom: the order of the parts, read from the source of every module."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
#: The folders of the two packages, by name.
FOLDERS = {
    "millpond": ROOT / "src" / "millpond",
    "millpond_lab": ROOT / "packages" / "millpond-lab" / "src" / "millpond_lab",
}
MODULES = {name: sorted(folder.rglob("*.py")) for name, folder in FOLDERS.items()}

#: A part imports only what stands to its left.
ORDER = {
    "millpond": [
        {
            "errors",
            "scalar",
            "setting",
            "budget",
            "cpu_limit",
            "install_command",
            "optional",
            "option_files",
            "option_pairs",
            "option_ranges",
            "prompt_marks",
            "registry",
            "typed_json",
        },
        {"images"},
        {"kernels"},
        {"tiers"},
        {"codec"},
        {"policy"},
        {"methods", "presets", "presses"},
        {"plugin_file", "plugins"},
        {"cache"},
        {"models"},
        {"hf"},
        {"inspector", "runner"},
        {"engine"},
        {"cluster", "server"},
        {"cli"},
    ],
    "millpond_lab": [
        {"markdown", "peer_process"},
        {"paging", "pond"},
        {"evals"},
        {"bench", "cluster_plan", "train"},
        {"fit", "papers"},
        {"cli"},
    ],
}
RANK = {(package, part): rank for package, order in ORDER.items() for rank, parts in enumerate(order) for part in parts}
PARTS = sorted(RANK)
#: Libraries and the parts of `millpond` that may know them; the command line takes transformers' types and streamer.
OUTSIDE = {
    "transformers": {"models", "hf", "inspector", "runner", "cli"},
    "matplotlib": {"cli"},
    "rich": {"cli", "engine", "models"},
    "typer": {"cli"},
    "triton": {"kernels"},
    "ray": {"cluster"},
    "fastapi": {"server"},
    "xgrammar": {"engine"},
    "scipy": {"engine"},
}
#: Modules that name the lab, which may be absent: `mp.fit`, the exam of the demo.
NAMES_LAB = {"__init__", "cli/demo/task"}


def home(module: Path) -> tuple[str, str]:
    """The package and the part of a module."""
    package = next(name for name, folder in FOLDERS.items() if module.is_relative_to(folder))
    return package, module.relative_to(FOLDERS[package]).parts[0].removesuffix(".py")


def imported(module: Path) -> Iterator[str]:
    """Full names of what a module imports, wherever in the file."""
    for node in ast.walk(ast.parse(module.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: relative import"
            if node.module in FOLDERS:
                yield from (f"{node.module}.{alias.name}" for alias in node.names)
            else:
                yield node.module or ""


def test_every_part_has_a_place_in_the_order() -> None:
    found = {home(module) for modules in MODULES.values() for module in modules}
    assert {(package, part) for package, part in found if part not in ("__init__", "__main__")} == set(PARTS)


@pytest.mark.parametrize(("package", "part"), PARTS)
def test_a_part_imports_only_what_stands_to_its_left(package: str, part: str) -> None:
    for module in MODULES[package]:
        if home(module) != (package, part):
            continue
        for name in imported(module):
            top, _, rest = name.partition(".")
            other = (top, rest.split(".")[0])
            if top == package and other in RANK and other != (package, part):
                free = package == "millpond" and RANK[other] == RANK[package, part] == 0
                assert free or RANK[other] < RANK[package, part], f"{module} imports {name}"
            if package == "millpond":
                assert part in OUTSIDE.get(top, {part}), f"{module} imports {top}"


@pytest.mark.slow
def test_the_package_runs_without_its_lab() -> None:
    """What names the lab imports it where it is called."""
    for module in MODULES["millpond"]:
        if any(name.partition(".")[0] == "millpond_lab" for name in imported(module)):
            assert str(module.relative_to(FOLDERS["millpond"]).with_suffix("")) in NAMES_LAB, module
    code = (
        "import sys; sys.modules['millpond_lab'] = None\n"
        "import pkgutil, importlib, millpond\n"
        "skipped = ('__main__', '.gpu', 'ray', 'millpond_')\n"
        "for module in pkgutil.walk_packages(millpond.__path__, 'millpond.'):\n"
        "    if not any(part in module.name for part in skipped): importlib.import_module(module.name)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def at_module_level(body: list[ast.stmt]) -> Iterator[ast.Import | ast.ImportFrom]:
    """Imports outside functions and classes, those for type checkers among them."""
    for node in body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif isinstance(node, ast.If | ast.Try):
            yield from at_module_level([*node.body, *node.orelse])


@pytest.mark.parametrize("package", FOLDERS)
def test_no_import_circle(package: str) -> None:
    names = {
        ".".join((package, *m.relative_to(FOLDERS[package]).with_suffix("").parts)).removesuffix(".__init__"): m
        for m in MODULES[package]
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
        graph[name] = (found & names.keys()) - {name, package}
    list(TopologicalSorter(graph).static_order())  # raises CycleError


PACKAGES = sorted(path.parent for folder in FOLDERS.values() for path in folder.rglob("__init__.py"))


@pytest.mark.parametrize("package", PACKAGES, ids=lambda p: p.name)
def test_every_package_says_what_it_holds(package: Path) -> None:
    doc = ast.get_docstring(ast.parse((package / "__init__.py").read_text(encoding="utf-8")))
    assert doc
    assert doc.splitlines()[0].endswith((".", "`")), doc
    modules = [file for file in package.glob("*.py") if file.stem != "__init__"]
    assert modules or list(package.glob("*/__init__.py")), "a package that holds nothing"


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
