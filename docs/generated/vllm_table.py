"""The tables of `how-to/vllm.md`, as the benchmarks of `packages/millpond-vllm` print them."""

from __future__ import annotations

import runpy

from generated.results import RESULTS, ROOT

SCRIPTS = ROOT / "packages" / "millpond-vllm" / "benchmarks"
#: Rows by the script that makes them.
ROWS = {"eviction": RESULTS / "vllm-eviction" / "rows.jsonl", "hit_rates": RESULTS / "vllm-hits" / "rows.jsonl"}


def vllm_tables() -> dict[str, str]:
    """Tables by the mark at which they stand: requests at once and speed, and hit rates of the prefix cache."""
    found = {}
    for name, rows in ROWS.items():
        script = runpy.run_path(str(SCRIPTS / f"{name}.py"))
        found[name.replace("_", "-")] = script["tables"](script["read_rows"](rows)) + "\n"
    return found
