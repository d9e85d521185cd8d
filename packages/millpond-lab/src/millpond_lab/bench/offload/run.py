"""Run of the offloading benchmark: what is made once, then each cell in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from millpond.engine.offload.planner import constants_for
from millpond.models.weights.packed_file import packed_sizes
from millpond.models.weights.skeleton import Skeleton
from millpond_lab.bench.common.machine import describe_machine
from millpond_lab.bench.offload.cap import SLACK
from millpond_lab.bench.offload.settings import CELLS, DEEPSPEED_LIMIT_S, OffloadSettings, Packages
from millpond_lab.bench.offload.shapes import COMMON, SHAPES, make_model, weight_bytes

#: Where packed weights are, in the folder of the model.
PACKED = "packed"


def prepare(folder: Path, settings: OffloadSettings, measure: bool) -> dict[str, Any]:
    """Write the model and its packed weights, and measure the machine, where that was not done before.

    Args:
        measure: measure the machine in any case.

    Returns:
        Speed of packing in bytes of plain weights per second; empty where they were packed before.
    """
    make_model(folder, settings.shape)
    torch.set_num_threads(settings.threads)
    constants_for(folder, None, again=measure)
    disk = folder / PACKED
    disk.mkdir(exist_ok=True)
    if list(disk.glob("*.weights")):
        return {}
    began = time.perf_counter()
    packed_sizes(disk, folder.resolve().name, Skeleton.of(folder), "int4")
    return {"packing_bytes_per_s": weight_bytes(folder) / (time.perf_counter() - began)}


def run(
    folder: Path,
    packages: Packages,
    settings: OffloadSettings,
    cells: Sequence[str],
    *,
    before: dict[str, Any] | None = None,
    measure: bool = False,
    keep: Callable[[dict[str, Any]], None] = lambda data: None,
) -> dict[str, Any]:
    """Run cells, and return a report.

    Args:
        folder: where the model is, or comes to be. packages: the other engines.
        before: a report, whose other cells are kept if it is of the same settings. measure: measure the machine first.
        keep: called with the report after each cell.
    """
    packing = prepare(folder, settings, measure)
    same = before is not None and before.get("settings") == asdict(settings)
    rows = [row for row in before["rows"] if row["cell"] not in cells] if same and before is not None else []
    kept = {name: before[name] for name in ("packing_bytes_per_s",) if same and before is not None and name in before}
    machine = describe_machine()
    data: dict[str, Any] = {
        "benchmark": "offload",
        "machine": machine.as_dict(),
        "hardware": machine.hardware,
        "software": machine.software,
        "settings": asdict(settings),
        "slack_bytes": SLACK,
        "model": {**SHAPES[settings.shape], **COMMON},
        "model_bytes": weight_bytes(folder),
        **kept,
        **packing,
    }
    for cell in cells:
        given = {
            "cell": cell,
            "folder": str(folder),
            "packages": {name: str(path) for name, path in asdict(packages).items()},
            "settings": asdict(settings),
        }
        command = [sys.executable, "-m", "millpond_lab.bench.offload.cell", json.dumps(given)]
        rows.append(row_of(cell, command, DEEPSPEED_LIMIT_S if cell.startswith("deepspeed") else None))
        data["rows"] = sorted(rows, key=lambda row: CELLS.index(row["cell"]))
        keep(data)
    return data


def row_of(cell: str, command: Sequence[str], limit_s: float | None) -> dict[str, Any]:
    """What a cell's process measured, or why it failed.

    Args:
        limit_s: seconds in which it must end; None: any time.
    """
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=limit_s)
    except subprocess.TimeoutExpired:
        return {"cell": cell, "failed": f"not done within {limit_s:,.0f} s"}
    if done.returncode:
        return {"cell": cell, "failed": (done.stderr.strip().splitlines() or [""])[-1][:300]}
    row: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return row
