"""Report of the offloading benchmark as Markdown."""

from __future__ import annotations

from typing import Any

from millpond_lab.bench.common.report import markdown_table
from millpond_lab.bench.offload.shapes import is_opt

#: Parts of a block whose time is predicted: while prompts are read, and after that.
PARTS = ("prefill", "decode")
#: Cells of ours, as tables and pictures name them.
NAMES = {
    "full": "Millpond, full cache",
    "h2o": "Millpond, H2O 20 %",
    "h2o-int4-kv": "Millpond, H2O 20 %, int4 KV",
    "h2o-int4-weights": "Millpond, H2O 20 %, int4 weights",
    "h2o-rotated4-kv": "Millpond, H2O 20 %, rotated4 KV",
    "h2o-int4-weights-rotated4-kv": "Millpond, H2O 20 %, int4 weights, rotated4 KV",
    "full-int4-weights": "Millpond, full cache, int4 weights",
    "full-no-overlap": "Millpond, full cache, no overlap",
}
#: Said of a report with rows of DeepSpeed or FlexGen.
_NOT_ENDED = "DeepSpeed and FlexGen are not ended where they take more memory than that; such rows say how much."

#: Said of a report with rows of FlexGen.
_STUBBED = (
    "FlexGen is its official code, on a CPU that answers its calls of CUDA: its copies between two memories are copies "
    "in one, and its products of float16 are computed in float32, both of which a GPU would spare it."
)


def markdown(data: dict[str, Any]) -> str:
    """A table with a row for each cell, and what it was measured on."""
    settings = data["settings"]
    ours = settings.get("our_steps")
    others = [row for row in data["rows"] if row["cell"].startswith("accelerate") and "failed" not in row]
    best = max((row["tokens_per_s"] / (1 - waited_share(row)) for row in others), default=0)
    head = (
        "engine",
        "requests at a time",
        "tok/s",
        "waited",
        "tok/s besides",
        "x Accelerate",
        "predicted tok/s",
        "time / predicted",
        "of prompts",
        "of decoding",
        "decode step, s",
        "disk, GB/s",
    )
    lines = [
        "# Offloading",
        "",
        f"Random {_kind(settings['shape'])} in bf16 ({data['model_bytes'] / 1e6:,.0f} MB), memory "
        f"{settings['memory'] / 2**20:,.0f} MiB and {data['slack_bytes'] / 2**20:,.0f} MiB for what no ledger counts, "
        f"prompts of {settings['prompt']} and answers of {settings['new']} tokens, {settings['threads']} threads.",
        f"One run of each cell on {data['hardware']}; {data['software']}.",
        "Ours runs one block of its plan in the schedule zigzag or row; rows with * are projected from the prompts and "
        f"{settings['steps']} decoding steps"
        + (f", of ours {ours}, whose later steps read caches that have grown as fast." if ours else "."),
        "Waited: share of the time in which the calling thread could have run and other processes had the cores; the "
        "columns from 'tok/s besides' to 'of decoding' are of the rest.",
        *([_NOT_ENDED] if any(row["cell"].startswith(("deepspeed", "flexgen")) for row in data["rows"]) else []),
        *([_STUBBED] if any(row["cell"].startswith("flexgen") for row in data["rows"]) else []),
        "Reads go on while it waits, so the rest of a part that reading bounds is too short.",
        "",
        markdown_table(head, [_row(row, label_of(row, data), best) for row in data["rows"]]),
    ]
    if "packing_bytes_per_s" in data:
        lines.append(f"Packing to int4: {data['packing_bytes_per_s'] / 1e6:,.0f} MB/s of the weights as saved.\n")
    lines.append(f"`{data['command']}`\n")
    return "\n".join(lines)


def _kind(shape: str) -> str:
    """Name of a shape with its family."""
    return f"OPT of {shape.removeprefix('opt-')}" if is_opt(shape) else f"Llama of {shape}"


def _row(row: dict[str, Any], name: str, best: float) -> list[str]:
    if "failed" in row:
        return [name, "", row["failed"], *[""] * 9]
    rate, predicted, waited = row["tokens_per_s"], row.get("predicted_tokens_per_s"), waited_share(row)
    besides = rate / (1 - waited)
    ratios = [f"{_besides(row, part) / row[f'predicted_{part}_s']:.2f}" if predicted else "" for part in PARTS]
    return [
        name,
        str(row["requests"]),
        f"{rate:.2f}",
        f"{waited:.0%}",
        f"{besides:.2f}",
        f"{besides / best:.1f}" if best else "",
        *([f"{predicted:.2f}", f"{predicted / besides:.2f}"] if predicted else ["", ""]),
        *ratios,
        f"{row['decode_step_s']:.2f}",
        " to ".join(f"{one:.2f}" for one in row["bandwidth_gb_per_s"]),
    ]


def _besides(row: dict[str, Any], part: str) -> float:
    """Seconds of a part without those that were waited."""
    seconds: float = row[f"{part}_s"] - row[f"{part}_waited_s"]
    return seconds


def waited_share(row: dict[str, Any]) -> float:
    """Share of the time of a cell in which its thread waited for a core."""
    if "waited_s" in row:
        share: float = row["waited_s"] / row["timed_s"]
        return share
    waited: float = sum(row[f"{part}_waited_s"] for part in PARTS)
    return waited / float(row["seconds"])


def label_of(row: dict[str, Any], data: dict[str, Any]) -> str:
    """What ran in a row's cell, * where it is projected, and the memory that it took where that is beyond the limit."""
    own = row.get("most_own_bytes", 0)
    beyond = own > data["settings"]["memory"] + data["slack_bytes"]
    took = f", beyond the limit: {own / 1e6:,.0f} MB" if beyond else ""
    return name_of(row["cell"]) + took + "*" * bool(row.get("projected"))


def name_of(cell: str) -> str:
    """What ran in a cell."""
    if cell.startswith("llamacpp"):
        _, weights, batch = cell.split("-")
        return f"llama.cpp, {weights} mapped from a file, batch {batch}"
    if cell.startswith("deepspeed"):
        _, device, batch = cell.split("-")
        where = "all weights in host memory" if device == "host" else "weights in files"
        return f"DeepSpeed ZeRO-3, {where}, batch {batch}"
    if cell.startswith("flexgen"):
        batch, batches = cell.removeprefix("flexgen-").split("x")
        return f"FlexGen, weights and KV in files, {batches} batches of {batch}"
    return NAMES.get(cell, f"Accelerate, disk offload, batch {cell.rpartition('-')[2]}")
