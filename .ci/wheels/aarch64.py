"""The wheel for aarch64 in an emulator: a Debian of that machine with its Python and torch, and the wheel in it."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import zipfile
from email import message_from_bytes
from pathlib import Path

import cuda_stand_ins
from build_wheels import ROOT, find
from environments import CheckError
from try_wheels import INSTALLED, TORCH

EMULATORS = ("qemu-aarch64-static", "qemu-aarch64")
#: Debian's Python, with what torch's and the wheel's libraries need of the system.
DEBIAN, PYTHON = "bookworm", "3.11"
PACKAGES = "libc6,libstdc++6,libgcc-s1,libgomp1,zlib1g,libssl3,python3.11"
SYSTEMS = ("manylinux_2_36_aarch64", "manylinux_2_28_aarch64", "manylinux_2_17_aarch64", "manylinux2014_aarch64")
#: One with every extension that the emulator knows, and one of the first generation: neither dot products nor bfloat16.
CPUS = ("max", "cortex-a72")
#: What torch reads of the system about its processor, which an emulator does not replace: that of a Cortex-A72.
CPU_FILES = {
    "proc/cpuinfo": (
        "processor\t: 0\nFeatures\t: fp asimd crc32 cpuid\nCPU implementer\t: 0x41\nCPU architecture: 8\n"
        "CPU variant\t: 0x0\nCPU part\t: 0xd08\nCPU revision\t: 3\n\n"
    ),
    "sys/devices/system/cpu/possible": "0\n",
    "sys/devices/system/cpu/present": "0\n",
    "sys/devices/system/cpu/cpu0/regs/identification/midr_el1": "0x00000000410fd083\n",
}
CHECK = ROOT / "tests" / "kernels" / "native" / "check.cpp"
CSRC = ROOT / "src" / "millpond" / "kernels" / "native" / "csrc"


def missing() -> str:
    """What to install for this check; "" if all is there."""
    tools = {
        "g++-aarch64-linux-gnu": ("aarch64-linux-gnu-g++",),
        "qemu-user-static": EMULATORS,
        "mmdebstrap": ("mmdebstrap",),
    }
    absent = [package for package, names in tools.items() if not any(map(shutil.which, names))]
    return f"apt install {' '.join(absent)}" if absent else ""


class Emulated:
    """A Debian for aarch64 in a folder, with torch and the wheel."""

    def __init__(self, folder: Path, wheels: Path) -> None:
        self.root, self.site, self.stand_ins = folder / "root", folder / "site", folder / "stand-ins"
        self.emulator = next(name for name in EMULATORS if shutil.which(name))
        wheel = find(wheels, "millpond", "aarch64")
        if not (self.root / "usr" / "bin" / f"python{PYTHON}").exists():
            command = ["mmdebstrap", "--quiet", "--variant=extract", "--architectures=arm64", f"--include={PACKAGES}"]
            subprocess.run([*command, DEBIAN, self.root], check=True)
        for name, text in CPU_FILES.items():
            (self.root / name).parent.mkdir(parents=True, exist_ok=True)
            (self.root / name).write_text(text, encoding="utf-8")
        self._install("--no-deps", TORCH)  # without CUDA, see cuda_stand_ins
        needs = [need for need in _requirements(self.site, "torch") if not re.match("cuda|nvidia|triton", need)]
        with zipfile.ZipFile(wheel) as archive:
            (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
            needs += message_from_bytes(archive.read(name)).get_all("Requires-Dist") or []
        self._install(*(need for need in needs if "extra ==" not in need and not need.startswith("torch")))
        self._install("--no-deps", "--upgrade", wheel)
        torch = [*(self.site / "torch").glob("lib/*.so*"), *(self.site / "torch").glob("_C.*.so")]
        present = {file.name for file in (*torch, *self.root.rglob("*.so.*"))}
        cuda_stand_ins.write(torch, present, self.stand_ins)
        self.check = folder / "check"
        flags = ["-std=c++17", "-O1", "-ffp-contract=off", f"-I{CSRC}"]
        subprocess.run(["aarch64-linux-gnu-g++", *flags, CHECK, "-o", self.check, "-ldl"], check=True)

    def _install(self, *what: str | Path) -> None:
        command: list[str | Path] = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "-q"]
        command += ["--target", self.site, "--python-version", PYTHON, "--only-binary", ":all:"]
        for system in SYSTEMS:
            command += ["--platform", system]
        subprocess.run([*command, *what], check=True)

    def run(self, cpu: str, program: Path, *arguments: str | Path) -> str:
        """What a program of this system prints on a CPU.

        Raises:
            CheckError: it fails, or executes what the CPU does not have.
        """
        given = {"LD_LIBRARY_PATH": self.stand_ins, "PYTHONPATH": self.site, "HF_HUB_OFFLINE": 1, "OMP_NUM_THREADS": 1}
        variables = [part for name, value in given.items() for part in ("-E", f"{name}={value}")]
        command = [self.emulator, "-cpu", cpu, "-L", self.root, *variables, program, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise CheckError(f"{' '.join(map(str, command))} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
        return done.stdout


def try_wheel(folder: Path, wheels: Path) -> dict[str, str]:
    """Run the wheel for aarch64 on both CPUs; returns what was tried.

    Raises:
        CheckError: something does not work.
    """
    system = Emulated(folder, wheels)
    python = system.root / "usr" / "bin" / f"python{PYTHON}"
    library = system.site / "millpond" / "kernels" / "native" / "millpond_neon.so"
    for cpu in CPUS:
        if "rules of heads" not in system.run(cpu, system.check, library):  # the last of all families
            raise CheckError(f"{CHECK} did not come to its end on {cpu}")
        if "kernels for neon" not in system.run(cpu, python, INSTALLED):
            raise CheckError(f"{INSTALLED} does not run the kernels on {cpu}")
    return {"runs on": ", ".join(CPUS)}


def _requirements(site: Path, package: str) -> list[str]:
    (metadata,) = site.glob(f"{package}-*.dist-info/METADATA")
    return message_from_bytes(metadata.read_bytes()).get_all("Requires-Dist") or []
