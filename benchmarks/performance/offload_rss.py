"""Resident memory of offloading: how far a process grows beyond its limit, with five plans.

    python benchmarks/performance/offload_rss.py --json offload-rss.json

Each plan runs in a process of its own, which has loaded the package and generated with the bundled model before:
memory is counted from then on, and its peak is the system's (VmHWM). "left" is what a limit does not count: the peak
may be 5 % and 16 MiB above the limit.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from script import keep

MIB = 1 << 20
#: What a peak may be above its limit: a share of it, and bytes.
SHARE, BESIDE = 0.05, 16 * MIB


@dataclass(frozen=True)
class Case:
    """A limit with a plan, and what runs.

    Attributes:
        plan: fields of `Plan`; None: the one that is searched for. disk: whether a folder is named for other files.
    """

    memory: str
    options: dict[str, Any]
    plan: dict[str, Any] | None = None
    disk: bool = False
    sequences: int = 12
    prompt: int = 128
    new: int = 16


CASES: dict[str, Case] = {
    "searched": Case("80MiB", {"method": "h2o", "budget": "20%"}),
    "layers from the disk": Case(
        "80MiB", {"method": "full", "max_running": 12}, {"weights": {"disk": 1.0}, "slots": 2, "prompt_rows": 64}
    ),
    "a third of the layers kept": Case(
        "176MiB",
        {"method": "full", "max_running": 12},
        {"weights": {"host": 0.33, "disk": 0.67}, "slots": 2, "prompt_rows": 256},
    ),
    "KV on the disk": Case(
        "72MiB",
        {"method": "h2o", "budget": 64, "max_running": 12},
        {"weights": {"disk": 1.0}, "kv": {"disk": 1.0}, "slots": 2, "micro_batch": 4, "prompt_rows": 64},
        disk=True,
    ),
    "int4, ends on the disk": Case(
        "40MiB",
        {"method": "snapkv", "budget": "30%", "weights": "int4", "max_running": 12},
        {"weights": {"disk": 1.0}, "ends": "disk", "slots": 2, "prompt_rows": 64},
        disk=True,
    ),
}


def make(folder: Path) -> None:
    """A random Llama of 16 layers, 270 MB in float32."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=512,
        intermediate_size=2048,
        num_hidden_layers=16,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=8_000,
        max_position_embeddings=2048,
        bos_token_id=1,
        eos_token_id=None,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def run(folder: Path, case: Case) -> dict[str, Any]:
    """The growth of this process, which begins here."""
    import millpond as mp
    from millpond.engine.offload.plan import Plan
    from millpond.engine.offload.planner import EXAMPLE
    from millpond_lab.bench.common.machine import PeakMemory

    warnings.simplefilter("ignore")
    params = mp.SamplingParams(max_tokens=case.new, temperature=0, ignore_eos=True)
    with mp.LLM("pond-recall", method="h2o", budget="50%", threads=1) as llm:
        llm.generate([[5, 6, 7]], mp.SamplingParams(max_tokens=2))
    peak = PeakMemory()
    given: dict[str, Any] = {"machine": EXAMPLE} if case.plan is None else {"plan": Plan(**case.plan)}
    with tempfile.TemporaryDirectory(dir=folder) as disk:
        if case.disk:
            given["disk"] = disk
        prompts = [[3 + (7 * n + 11 * i) % 7_900 for i in range(case.prompt)] for n in range(case.sequences)]
        with mp.LLM(str(folder), memory=case.memory, **given, **case.options) as llm:
            opened = peak.growth()
            llm.generate(prompts, params)
    return {"opened": opened, "peak": peak.growth()}


def measured(folder: Path, name: str) -> dict[str, Any]:
    """A row of the table: one plan in a process of its own."""
    from millpond.budget import parse_bytes

    command = [sys.executable, __file__, "--folder", str(folder), "--case", name]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{name}: {done.stderr}")
    found, limit = json.loads(done.stdout.splitlines()[-1]), parse_bytes(CASES[name].memory)
    allowed = int(limit * (1 + SHARE)) + BESIDE
    return {"plan": name, "limit": limit, "allowed": allowed, **found, "holds": found["peak"] <= allowed}


def main() -> None:
    """Read the options, and print what each plan took."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--folder", type=Path, help="Of the model, made where it does not exist. Default: a new one.")
    parser.add_argument("--case", choices=list(CASES), help="Run this plan here, and print its growth as JSON.")
    parser.add_argument("--json", type=Path, help="Write the rows here.")
    args = parser.parse_args()
    if args.case is not None:
        print(json.dumps(run(args.folder, CASES[args.case])))
        return
    with tempfile.TemporaryDirectory() as made:
        folder = args.folder or Path(made) / "model"
        if not (folder / "config.json").exists():
            make(folder)
        rows = [measured(folder, name) for name in CASES]
    for row in rows:
        shown = ", ".join(f"{key} {row[key] / MIB:.1f}" for key in ("limit", "allowed", "opened", "peak"))
        print(f"{row['plan']}: {shown} MiB{'' if row['holds'] else ' - too much'}")
    args.folder = None
    keep(args, rows)


if __name__ == "__main__":
    main()
