"""Speed and memory of `generate()`, for the README and the page about speed."""

from __future__ import annotations

from typing import Any

from generated.results import read
from millpond_lab.bench.common.report import generate_table, markdown_table


def result_table() -> str:
    """The committed measurement of generate() at the longest prompt of one sequence."""
    data, prompt, rows = measured()
    origin = f"{data['hardware']}; {data['software']}; `{data['command']}`."
    where = f"One sequence, prompt {prompt:,} ([all cells](../../benchmarks/results/generate.md))."
    return f"{origin}\n{where}\n\n{generate_table(rows, data['anchor'])}"


def measured() -> tuple[dict[str, Any], int, list[dict[str, Any]]]:
    """The committed measurement of generate(), its longest prompt of one sequence, and the rows of that."""
    data = read("generate")
    prompt = max(r["prompt"] for r in data["results"] if r["batch"] == 1)
    return data, prompt, [r for r in data["results"] if (r["batch"], r["prompt"]) == (1, prompt)]


def savings() -> str:
    """The README's three numbers: what our layers save, and what eviction saves."""
    data, prompt, rows = measured()
    names = (("transformers DynamicCache", "sdpa"), ("millpond full", ""), ("millpond h2o", "20%"))
    stock, full, h2o = (next(r for r in rows if (r["name"], r["setting"]) == name) for name in names)
    times = [r["decode_ms"] for r in (stock, full, h2o)]
    table = markdown_table(
        ("", "DynamicCache", "Millpond, full cache", "Millpond, `h2o` at 20 %"),
        [
            ("KV cache, MB", *(f"{r['kv_bytes'] / 1e6:.1f}" for r in (stock, full, h2o))),
            ("decoding, ms a step", *(f"{ms:.1f}" for ms in times)),
        ],
    )
    return (
        f"A prompt of {prompt:,} tokens, a random Llama of 168M parameters in bf16, {data['hardware']}:\n\n"
        f"{table}\nOf the time saved, {times[0] - times[1]:.1f} ms are our layers and kernels, and "
        f"{times[1] - times[2]:.1f} ms are eviction, whose own saving is the memory."
    )
