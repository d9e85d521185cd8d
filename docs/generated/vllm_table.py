"""The table of `how-to/vllm.md`, as `packages/millpond-vllm/benchmarks/eviction.py` prints it."""

from __future__ import annotations

import json
import runpy

from generated.results import RESULTS, ROOT

SCRIPT = ROOT / "packages" / "millpond-vllm" / "benchmarks" / "eviction.py"
ROWS = RESULTS / "vllm-eviction" / "rows.jsonl"


def eviction_table() -> str:
    """Requests at once and speed of each setting inside vLLM."""
    rows = [json.loads(line) for line in ROWS.read_text(encoding="utf-8").splitlines()]
    table: str = runpy.run_path(str(SCRIPT))["table"](rows)
    return f"{table}\n"
