"""What InfLLM's blocks outside of the pool cost and save, on the page of `infllm`."""

from __future__ import annotations

from generated.results import RESULTS, read


def blocks_section() -> str:
    """Requests at once, tokens per second and bytes moved with blocks in the pool and in files."""
    load = read("infllm-blocks")["settings"]
    table = (RESULTS / "infllm-blocks.md").read_text(encoding="utf-8").split("\n\n")[-1]
    return (
        f"## Blocks outside of the pool\n\n{load['model']} in float32 in an engine with `kv_memory` of "
        f"{load['kv_memory']}: {load['requests']} requests of {load['tokens']:,} tokens and {load['new']} new ones, "
        f"budget {load['budget']}, {', '.join(f'`{name}={value}`' for name, value in load['options'].items())}. "
        "Written and read are keys and values of blocks, as they lie there; the last column says how many answers have "
        f"the tokens of the first row.\n\n{table}\n"
        "From `benchmarks/performance/infllm_blocks.py` "
        "([rows](../../../benchmarks/results/infllm-blocks.md)).\n"
    )
