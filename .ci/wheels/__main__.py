"""Build the wheels of millpond and try them: `make wheels`.

    python .ci/wheels [--out build/wheels] [--machines x86_64,aarch64] [--extras cli,server] [--report FILE]

1. Builds them, with kernels for every instruction set of a machine, and looks into each.
2. Installs the one for this machine into a fresh environment that reaches no compiler, and uses it on every instruction
   set that this CPU has.
3. Installs it with each extra alone, uses what the extra is for, and sees that refused without, with the command that
   installs it.
4. Runs the wheel for aarch64 in an emulator, on two CPUs.

A machine of another kind than this one needs a cross compiler and an emulator; where these are missing it is left out,
and the last line says what to install.
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import sys
import tempfile
from functools import cache
from pathlib import Path

import aarch64
import build_wheels
import try_wheels
import wheel_contents
from environments import CheckError, Environment
from extras import USES

MACHINE = platform.machine()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=build_wheels.ROOT / "build" / "wheels", help="folder of the wheels")
    parser.add_argument("--machines", type=_names, default=(MACHINE, "aarch64"))
    parser.add_argument("--extras", type=_names, default=tuple(USES), help="those to try; '' for none")
    parser.add_argument("--no-build", action="store_true", help="take the wheels that are in the folder")
    parser.add_argument("--report", type=Path, help="write the sizes and what was tried as JSON")
    options = parser.parse_args()
    machines, absent = tuple(dict.fromkeys(options.machines)), aarch64.missing()
    if absent and MACHINE != "aarch64":
        machines = tuple(name for name in machines if name != "aarch64")
    out = options.out.resolve()
    with tempfile.TemporaryDirectory(prefix="millpond-wheels-") as name:
        try:
            report = check(out, Path(name), machines, options.extras, build=not options.no_build)
        except (CheckError, FileNotFoundError) as error:
            print(error, file=sys.stderr)
            return 1
    if options.report:
        options.report.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(f"the wheels are in {out}")
    if "aarch64" in options.machines and "aarch64" not in machines:
        print(f"aarch64 was left out; {absent}")
    return 0


def check(
    out: Path, scratch: Path, machines: tuple[str, ...], extras: tuple[str, ...], *, build: bool
) -> dict[str, dict[str, object]]:
    """Build and try; returns the sizes of each wheel, and what was tried.

    Raises:
        CheckError: a wheel does not do what it must.
    """
    if build:
        shutil.rmtree(out, ignore_errors=True)
        build_wheels.build(out, scratch / "build", machines=machines)
    report: dict[str, dict[str, object]] = {"bytes": {}, "tried": {}}
    for wheel in sorted(out.glob("*.whl")):
        wrong = wheel_contents.faults(wheel)
        if wrong:
            raise CheckError(f"{wheel.name}: " + "; ".join(wrong))
        sizes = wheel_contents.sizes(wheel)
        report["bytes"][_label(wheel)] = sizes
        say(f"{wheel.name}: {sizes['packed']:,} bytes, {sizes['unpacked']:,} unpacked")
    if MACHINE in machines:
        seen = try_wheels.libraries(scratch / "libraries", build_wheels.find(out, "millpond", MACHINE))
        report["tried"][MACHINE] = try_wheels.try_alone(scratch / "bare", out, seen, MACHINE)
        say(f"{MACHINE}: {report['tried'][MACHINE]}")
        for extra in extras:
            _try_extra(extra, scratch, out, seen)
        report["tried"]["extras"] = list(extras)
        shutil.rmtree(seen.folder)
    if "aarch64" in machines and MACHINE != "aarch64":
        report["tried"]["aarch64"] = aarch64.try_wheel(scratch / "aarch64", out)
        say(f"aarch64: {report['tried']['aarch64']}")
    return report


@cache
def _without(extra: str, scratch: Path, out: Path, seen: Environment) -> Environment:
    """An environment in which uses of other extras are refused, made once."""
    return try_wheels.with_extra(extra, scratch / f"without-{extra}", out, seen)


def _try_extra(extra: str, scratch: Path, out: Path, seen: Environment) -> None:
    environment = try_wheels.with_extra(extra, scratch / extra, out, seen)
    try_wheels.try_use(extra, environment)
    shutil.rmtree(environment.folder)
    is_refused = try_wheels.try_refusal(extra, _without(USES[extra].without, scratch, out, seen))
    more = "is named where it is missing" if is_refused else f"{USES[extra].library} is there without it"
    say(f"millpond[{extra}] works alone, and {more}")


def _label(wheel: Path) -> str:
    """The machine of a wheel with kernels, and the package of another."""
    package, _, _, _, system = wheel.stem.split("-")
    return package if system == "any" else system.partition("_2_")[2].partition("_")[2] or system


def _names(text: str) -> tuple[str, ...]:
    return tuple(name for name in text.split(",") if name)


def say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
