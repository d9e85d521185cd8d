"""Parts that the scripts share: options, how they begin, intervals, the JSON that they keep, and rows that grow."""

from __future__ import annotations

import argparse
import json
import random
import statistics
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from millpond_lab.bench.common.machine import describe_machine
from millpond_lab.bench.generate.candidates import TINY, ModelShape


def begin(parser: argparse.ArgumentParser) -> tuple[argparse.Namespace, ModelShape]:
    """The options, --threads, --tiny and --json among them, and the shape of the model."""
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tiny", action="store_true", help="A small model: a test of this script, not of speed.")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    warnings.simplefilter("ignore", UserWarning)
    torch.set_num_threads(args.threads)
    return args, TINY if args.tiny else ModelShape()


def keep(args: argparse.Namespace, results: Sequence[object], **more: object) -> None:
    """Write the results to the file of --json, where there is one, with the options and the machine."""
    if args.json:
        told = {name: value.name if isinstance(value, Path) else value for name, value in vars(args).items()}
        del told["json"]
        if told.get("model") is not None:  # a path says where it lies on this machine
            told["model"] = Path(told["model"]).name
        machine = describe_machine()
        found = {"load": told, **more, "hardware": machine.hardware, "software": machine.software, "results": results}
        args.json.write_text(json.dumps(found, indent=1) + "\n")


class GrowingRows:
    """Rows that a script adds to the file of --json as they come; the next run of the same load goes on from them.

    Args:
        path: The file; None: nothing is written.
        load: Options that the rows depend on; rows of another load are left behind.
        key: Fields that name a row.

    Attributes:
        rows: All rows, those of earlier runs first.
    """

    def __init__(self, path: Path | None, load: dict[str, Any], *key: str) -> None:
        self._path, self._load, self._key = path, json.loads(json.dumps(load)), key
        self.rows: list[dict[str, Any]] = []
        if path is not None and path.exists():
            held = json.loads(path.read_text(encoding="utf-8"))
            if held["load"] == self._load:
                self.rows = held["rows"]

    def has(self, *name: object) -> bool:
        """Whether there is a row of this name: the values of the fields `key`."""
        return any(tuple(row[field] for field in self._key) == name for row in self.rows)

    def add(self, row: dict[str, Any]) -> None:
        """Keep one more row, its numbers with five digits, and print it."""
        self.rows.append(json.loads(json.dumps(row), parse_float=lambda text: float(f"{float(text):.5g}")))
        print(self.rows[-1], flush=True)
        if self._path is not None:
            machine = describe_machine()
            head = {"load": self._load, "hardware": machine.hardware, "software": machine.software}
            lines = ",\n".join(json.dumps(one, separators=(",", ":")) for one in self.rows)
            self._path.write_text(f'{json.dumps(head)[:-1]}, "rows": [\n{lines}\n]}}\n', encoding="utf-8")


def interval(ratios: list[float], draws: int = 2000) -> tuple[float, float]:
    """The 95 % interval of the median, by the bootstrap over rounds."""
    rng = random.Random(0)
    medians = sorted(statistics.median(rng.choices(ratios, k=len(ratios))) for _ in range(draws))
    return medians[draws // 40], medians[-draws // 40]
