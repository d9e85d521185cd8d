"""Parts that the scripts share: options, how they begin, the interval of a median, and the JSON that they keep."""

from __future__ import annotations

import argparse
import json
import random
import statistics
import warnings
from collections.abc import Sequence
from pathlib import Path

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


def interval(ratios: list[float], draws: int = 2000) -> tuple[float, float]:
    """The 95 % interval of the median, by the bootstrap over rounds."""
    rng = random.Random(0)
    medians = sorted(statistics.median(rng.choices(ratios, k=len(ratios))) for _ in range(draws))
    return medians[draws // 40], medians[-draws // 40]
