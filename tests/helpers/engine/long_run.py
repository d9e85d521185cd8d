"""Many short requests of a model whose weights and KV lie on the disk, in a process of its own; prints what it held."""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

from millpond.engine.config import EngineConfig
from millpond.engine.engine import Engine
from millpond.engine.offload.open import open_in_memory
from millpond.engine.offload.plan import Plan, save_plan
from millpond.engine.request import Request
from millpond.engine.sampling.params import SamplingParams

#: Of each request. Prompts are different.
PROMPT, NEW = 44, 8


def prompt(n: int) -> tuple[int, ...]:
    return tuple((7 * n + 11 * k * k + k) % 990 + 3 for k in range(PROMPT - n % 20))


def run(folder: Path, disk: Path, memory: int, n_requests: int) -> dict[str, Any]:
    """Run them, and tell the most bytes that were held; of residents those of the imports alone too, and those at a
    third of the requests."""
    imported, third = _peak(), 0
    plan = Plan(weights={"disk": 1.0}, kv={"disk": 1.0}, ends="disk", slots=2, micro_batch=16, prompt_rows=128)
    save_plan(plan, disk / "plan.json")
    config = EngineConfig(method="full", page_slots=4, max_running=40)
    found = open_in_memory(folder, memory, plan, None, config, disk=disk)
    assert found.tier is not None
    assert found.streamed is not None
    engine = Engine(found.model, None, found.config, streamed=found.streamed, tier=found.tier)
    params = SamplingParams(max_tokens=NEW, temperature=0, ignore_eos=True)
    for n in range(n_requests):
        engine.add(Request(request_id=str(n), prompt=prompt(n), params=params))
    lengths, errors, kv, running, steps = set[int](), list[str](), 0, 0, 0
    n_ended = 0
    while engine.busy:
        for output in engine.step():
            if output.finished:
                n_ended += 1
                lengths.add(len(output.completions[0].token_ids))
                errors += [] if output.error is None else [str(output.error)]
        third = third or (_peak() if n_ended >= n_requests // 3 else 0)
        kv, running, steps = max(kv, found.tier.bytes_used), max(running, engine.stats().running), steps + 1
    files = found.streamed._files.values()
    held = {
        "ended": n_ended,
        "lengths": sorted(lengths),
        "errors": errors,
        "kv": kv,
        "running": running,
        "steps": steps,
        "ledger": found.ledger.peak("host"),
        "direct": all(file.direct for file in files),
        "resident": _peak(),
        "imported": imported,
        "third": third,
        "during": sorted(path.name for path in disk.iterdir()),
    }
    engine.check_integrity()
    engine.close()
    return held


def _peak() -> int:
    """Most bytes that were resident since the process began."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    print(json.dumps(run(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))))
