"""The wheels in use: one without any extra, on each instruction set; then each extra alone."""

from __future__ import annotations

import ast
import re
import shlex
import shutil
import zipfile
from email import message_from_bytes
from pathlib import Path

from build_wheels import ROOT, find
from environments import CheckError, Environment
from extras import USES

TORCH = "torch==2.13.0"
INSTALLED = ROOT / "tests" / "package" / "installed.py"
#: The instruction sets of a CPU, best first, and those of a wheel that it cannot run.
SETS = """
from millpond.kernels.native.library import installed, runnable
print((runnable(), sorted({*installed()} - {*runnable()})))
"""


def libraries(folder: Path, wheel: Path) -> Environment:
    """An environment with torch, and what the wheel needs without an extra; not the wheel itself."""
    made = Environment(folder)
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        needs = message_from_bytes(archive.read(name)).get_all("Requires-Dist") or []
    made.install(TORCH)  # first: one known version, whatever else asks for it
    made.install(TORCH, *(need for need in needs if "extra ==" not in need))
    return made


def try_alone(folder: Path, wheels: Path, seen: Environment, machine: str) -> dict[str, str]:
    """Install the wheel without any extra, and use it on each instruction set; returns what was tried.

    Raises:
        CheckError: something does not work.
    """
    bare = Environment(folder, seen)
    bare.install(find(wheels, "millpond", machine))
    runnable, others = ast.literal_eval(bare.succeed(["python", "-c", SETS]))
    for isa in ["", *runnable]:
        said = bare.succeed(["python", INSTALLED], **({"MILLPOND_ISA": isa} if isa else {}))
        if f"kernels for {isa or runnable[0]}" not in said:
            raise CheckError(f"MILLPOND_ISA={isa!r}: {said}")
    for isa in others:
        done = bare.run(["python", INSTALLED], MILLPOND_ISA=isa)
        if done.returncode == 0 or "cannot run here" not in done.stderr:
            raise CheckError(f"MILLPOND_ISA={isa} is not refused: {done.stdout}{done.stderr}")
    shutil.rmtree(folder)
    return {"runs with": ", ".join(runnable), "refuses": ", ".join(others)}


def with_extra(extra: str, folder: Path, wheels: Path, seen: Environment) -> Environment:
    """An environment with the wheel and one extra, "" for none."""
    made = Environment(folder, seen)
    sources = USES[extra].sources if extra else ()
    made.install(f"millpond[{extra}]" if extra else "millpond", wheels=wheels, sources=sources)
    return made


def try_use(extra: str, environment: Environment) -> None:
    """Use an extra in an environment that has it alone.

    Raises:
        CheckError: the extra lacks something.
    """
    use = USES[extra]
    said = environment.succeed(_command(use.works), **dict(use.variables))
    if use.says not in said:
        raise CheckError(f"millpond[{extra}] does not say {use.says!r}: {said}")


def try_refusal(extra: str, without: Environment) -> bool:
    """Use an extra in an environment that lacks it; returns False where something else has brought its library.

    Raises:
        CheckError: it is not refused, or the command that installs the extra is not named.
    """
    use = USES[extra]
    if without.run(["python", "-c", f"import {use.library}"]).returncode == 0:
        return False
    done = without.run(_command(use.refused))
    said = " ".join((done.stdout + done.stderr).split())
    if done.returncode == 0 or not re.search(rf"pip install .*'millpond\[{extra}\]'", said):
        raise CheckError(f"without {extra}, {use.refused!r} ended with {done.returncode} and does not name it: {said}")
    return True


def _command(use: str) -> list[str]:
    is_line = use.startswith("millpond ")
    return shlex.split(use) if is_line else ["python", "-c", use.replace("CHECKOUT", str(ROOT))]
