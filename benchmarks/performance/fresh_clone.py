"""CPU seconds from a fresh clone to the answer of the demo, by part: `make demo` with its environment of its own.

    python benchmarks/performance/fresh_clone.py [--out FILE] [--most SECONDS]

It clones the checkout that it lies in (what is committed) into a temporary folder and runs `make demo` there. Counted
is the CPU time of all processes, compilers among them; what pip spends on downloads is counted by parts: `install` is
torch and the other requirements, `build` the native kernels, `demo` the rest. With --most the exit status is 1 where
build and demo together take more.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
#: Parts, by the file that make has made when each is done.
PARTS = {"install": ".venv/.millpond-requirements", "build": ".venv/.millpond-installed", "demo": "demo"}


def cpu_seconds(command: list[str], folder: Path) -> float:
    """CPU seconds of a command with all that it starts."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    env = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "VIRTUAL_ENV"))}
    subprocess.run(command, cwd=folder, env=env, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--most", type=float, help="CPU seconds of build and demo, at most")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="millpond-fresh-") as name:
        folder = Path(name) / "millpond"
        subprocess.run(["git", "clone", "--quiet", "--depth", "1", f"file://{ROOT}", str(folder)], check=True)
        found = {part: round(cpu_seconds(["make", target], folder), 1) for part, target in PARTS.items()}
    found["build and demo"] = round(found["build"] + found["demo"], 1)
    report = {"cpu_seconds": found, "machine": platform.processor() or platform.machine(), "cores": os.cpu_count()}
    print(json.dumps(report))
    if options.out:
        options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    if options.most is not None and found["build and demo"] > options.most:
        print(f"more than {options.most:g} CPU seconds", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
