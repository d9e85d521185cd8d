"""Check and time the Triton kernels on a CUDA GPU.

    PYTHONPATH=src python benchmarks/gpu/gpu_check.py --out DIR

Sections (--only takes a comma-separated choice):
    check    every op against the reference on the device; a mismatch makes the exit status 1
    graph    a decode step with eviction, captured in a CUDA graph and replayed, against the reference
    decode   attention of one layer, 32 query heads over 8 KV heads of width 128, as a share of copy bandwidth
    prefill  causal attention with and without column sums, against the flash attention of torch
    codes    decode over packed pages, see gpu_codes.py: every format against the reference
    code-speed  every format against bfloat16
    sweep    decode with other split, block, warp and stage counts
Results go to DIR/gpu_check.json after each section. --interpret --tiny runs all of it on a CPU in the interpreter of
Triton: a test of this script, not of speed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

if "--interpret" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported

from gpu_codes import run_code_speed, run_codes
from gpu_machine import Machine
from gpu_ops import run_check, run_graph
from gpu_rows import Row
from gpu_speed import run_decode, run_prefill, run_sweep

SECTIONS: dict[str, Callable[[Machine], list[Row]]] = {
    "check": run_check,
    "graph": run_graph,
    "decode": run_decode,
    "prefill": run_prefill,
    "codes": run_codes,
    "code-speed": run_code_speed,
    "sweep": run_sweep,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for gpu_check.json")
    parser.add_argument("--only", default=",".join(SECTIONS), help="comma-separated sections")
    parser.add_argument("--interpret", action="store_true", help="run on the CPU in the interpreter of Triton")
    parser.add_argument("--part", default="0/1", help="K/N: the K-th of N parts of the checks")
    parser.add_argument("--tiny", action="store_true", help="the smallest shapes")
    options = parser.parse_args()
    k, n = map(int, options.part.split("/"))
    machine = Machine(options.interpret, options.tiny, (k, n))
    options.out.mkdir(parents=True, exist_ok=True)
    report: dict[str, Any] = {"machine": machine.describe()}
    print(report["machine"])
    failed = False
    for name in options.only.split(","):
        begin = time.perf_counter()
        report[name] = SECTIONS[name](machine)
        report.setdefault("seconds", {})[name] = round(time.perf_counter() - begin, 1)
        failed = failed or any(row.get("ok") is False for row in report[name])
        (options.out / "gpu_check.json").write_text(json.dumps(report, indent=1) + "\n")
    print("\nseconds by section:", report["seconds"], "FAILED" if failed else "all checks passed")
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
