"""What a wheel must hold and must not: its files, their list with sums, and the names that its metadata states."""

from __future__ import annotations

import base64
import csv
import hashlib
import re
import zipfile
from pathlib import Path

#: Nothing of this belongs into any wheel: sources of kernels, tests, what Python or a build leaves behind.
UNWANTED = re.compile(r"csrc/|CMakeLists|\.(cpp|hpp|c|h|pyc|o|a)$|__pycache__|(^|/)tests?/|(^|/)(build|\.venv)/")
#: Libraries of the wheel with kernels, by machine: the one that asks the CPU, and one per instruction set.
LIBRARIES = {"x86_64": {"cpu", "baseline", "v3", "v4", "v4bf16", "v4fma"}, "aarch64": {"cpu", "neon"}}
LIBRARY = re.compile(r"millpond/kernels/native/millpond_(\w+)\.so")
#: What the entry points of a package must name.
ENTRY_POINTS = {
    "millpond": ("millpond = millpond.cli:main",),
    "millpond_lab": ("bench = millpond_lab.cli.bench.app:app", "lfu = millpond_lab.paging.lfu"),
    "millpond_models": (),
    "millpond_vllm": ("millpond-vllm = millpond_vllm.cli.app:main", "[vllm.general_plugins]"),
}


def faults(wheel: Path) -> list[str]:
    """What is wrong with a wheel, a sentence each; nothing if all is well."""
    package, _, _, _, system = wheel.stem.split("-")
    with zipfile.ZipFile(wheel) as archive:
        files = {name: archive.read(name) for name in archive.namelist() if not name.endswith("/")}
    found = [f"{name} does not belong into a wheel" for name in files if UNWANTED.search(name)]
    tops = {name.split("/")[0].partition("-")[0] for name in files}
    if tops != {package}:
        found.append(f"it installs {', '.join(sorted(tops))}, and not {package} alone")
    found += _metadata(package, system, files)
    if f"{package}/py.typed" not in files and package != "millpond_models":
        found.append("py.typed is missing: type checkers would ignore its types")
    libraries = {match[1] for name in files if (match := LIBRARY.fullmatch(name))}
    machine = next((name for name in LIBRARIES if system.endswith(name)), "")
    if libraries != LIBRARIES.get(machine, set()):
        found.append(f"it has kernels for {', '.join(sorted(libraries)) or 'nothing'}")
    return found + _record(files)


def _metadata(package: str, system: str, files: dict[str, bytes]) -> list[str]:
    (folder,) = {name.split("/")[0] for name in files if ".dist-info/" in name}
    text = {name.rpartition("/")[2]: files[name].decode() for name in files if name.startswith(f"{folder}/")}
    found = [f"{folder} has no {name}" for name in ("METADATA", "WHEEL", "RECORD") if name not in text]
    if package in ("millpond",) and f"{folder}/licenses/LICENSE" not in files:
        found.append("the licence is missing")
    if "License-Expression: Apache-2.0" not in text.get("METADATA", ""):
        found.append("its metadata names no licence")
    tags = re.findall(r"^Tag: (.+)$", text.get("WHEEL", ""), re.MULTILINE)
    if tags != [f"py3-none-{tag}" for tag in system.split(".")]:
        found.append(f"its name says {system}, and WHEEL says {', '.join(tags)}")
    points = text.get("entry_points.txt", "")
    return found + [f"no entry point {point!r}" for point in ENTRY_POINTS[package] if point not in points]


def _record(files: dict[str, bytes]) -> list[str]:
    """RECORD lists every file but itself, with its SHA-256 and its size."""
    (record,) = [name for name in files if name.endswith(".dist-info/RECORD")]
    listed = {row[0]: row[1:] for row in csv.reader(files[record].decode().splitlines())}
    found = [f"RECORD does not list {name}" for name in files if name not in listed]
    for name, (digest, size) in listed.items():
        if name == record:
            continue
        if name not in files:
            found.append(f"RECORD lists {name}, which is not there")
            continue
        sha256 = base64.urlsafe_b64encode(hashlib.sha256(files[name]).digest()).rstrip(b"=").decode()
        if digest != f"sha256={sha256}" or size != str(len(files[name])):
            found.append(f"{name} is not the file that RECORD lists")
    return found


def sizes(wheel: Path) -> dict[str, int]:
    """Bytes of a wheel: packed, unpacked, and those of its kernels for one instruction set at most."""
    with zipfile.ZipFile(wheel) as archive:
        libraries = [one.file_size for one in archive.infolist() if LIBRARY.fullmatch(one.filename)]
        found = {"packed": wheel.stat().st_size, "unpacked": sum(one.file_size for one in archive.infolist())}
    return found | ({"kernels": sum(libraries), "largest library": max(libraries)} if libraries else {})
