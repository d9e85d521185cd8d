"""Libraries by the names of CUDA's, all of whose functions say that there is no device.

The torch that registries carry for aarch64 is linked against CUDA, gigabytes that no CPU calls: the loader needs their
names, and torch at most asks how many devices there are. Not for anything but the emulator.
"""

from __future__ import annotations

import re
import subprocess
from collections import defaultdict
from pathlib import Path

CROSS = "aarch64-linux-gnu-"
NO_DEVICE = 100  #: cudaErrorNoDevice
#: Functions of CUDA's libraries that are linked without a version.
OF_CUDA = re.compile(r"(__cuda|cu|nv|nccl)[A-Za-z]\w*")
NEEDED = re.compile(r"\(NEEDED\).*\[(.+)\]")
UNDEFINED = re.compile(r"(?:GLOBAL|WEAK) +DEFAULT +UND (\w+)(?:@(\S+))?")
DEFINED = re.compile(r"(?:GLOBAL|WEAK) +DEFAULT +\d+ (\w+)")


def write(libraries: list[Path], present: set[str], to: Path) -> list[str]:
    """Make the libraries that others need and that are not there.

    Args:
        libraries: those that need them. present: names of what is there. to: folder for what is made.

    Returns:
        Their names.
    """
    missing: set[str] = set()
    wanted: dict[tuple[str, str], set[str]] = defaultdict(set)  # by library and version, "" for none
    loose: set[str] = set()
    defined: set[str] = set()
    for library in libraries:
        missing |= set(NEEDED.findall(_readelf("-d", library))) - present
    for library in libraries:
        symbols = _readelf("--dyn-syms", library)
        owner = _owners(_readelf("-V", library))
        defined |= set(DEFINED.findall(symbols))
        for name, version in UNDEFINED.findall(symbols):
            if not version:
                loose.add(name)
            elif owner.get(version) in missing:
                wanted[owner[version], version].add(name)
    names = sorted(missing)
    if names:
        wanted[names[0], ""] = {name for name in loose - defined if OF_CUDA.fullmatch(name)}
    to.mkdir(parents=True, exist_ok=True)
    for name in names:
        _compile(to / name, {version: functions for (of, version), functions in wanted.items() if of == name})
    return names


def _readelf(option: str, library: Path) -> str:
    done = subprocess.run([f"{CROSS}readelf", "-W", option, library], capture_output=True, text=True, check=True)
    return done.stdout


def _owners(text: str) -> dict[str, str]:
    """Which library each version belongs to that another one needs."""
    owners, file = {}, ""
    for line in text.splitlines():
        if found := re.search(r"File: (\S+)", line):
            file = found[1]
        elif (found := re.search(r"Name: (\S+) +Flags", line)) and file:
            owners[found[1]] = file
    return owners


def _compile(to: Path, functions: dict[str, set[str]]) -> None:
    source, script = to.with_suffix(".c"), to.with_suffix(".map")
    names = sorted(set().union(*functions.values()))
    source.write_text("".join(f"int {name}(void) {{ return {NO_DEVICE}; }}\n" for name in names), encoding="utf-8")
    versions = [
        f"{version} {{ global: {'; '.join(sorted(of))}; }};" for version, of in functions.items() if version and of
    ]
    script.write_text("\n".join(versions), encoding="utf-8")
    more = [f"-Wl,--version-script={script}"] if versions else []
    command = [f"{CROSS}g++", "-x", "c", "-w", "-fno-builtin", "-shared", "-fPIC", f"-Wl,-soname,{to.name}", *more]
    subprocess.run([*command, source, "-o", to], check=True)
