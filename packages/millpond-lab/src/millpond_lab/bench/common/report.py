"""Results as JSON and as Markdown, with the machine and the command that made them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

BOUNDS_FROM = 4096  #: tokens of a prompt from which the bounds of `bench methods` are meant
SHORT = f" The bounds are meant for prompts of {BOUNDS_FROM:,} tokens and more; here they check the machinery."
ANCHOR_SETTING = "sdpa"  #: the default of transformers; speed-ups are read against it


def write_report(out: Path, name: str, data: dict[str, Any], text: str) -> list[Path]:
    """Write `name`.json and `name`.md into `out`; returns both paths."""
    out.mkdir(parents=True, exist_ok=True)
    files = [out / f"{name}.json", out / f"{name}.md"]
    files[0].write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    files[1].write_text(text, encoding="utf-8")
    return files


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; the first column to the left, the others to the right."""
    lines = ["| " + " | ".join(head) + " |", "|" + "|".join(["---", *["---:"] * (len(head) - 1)]) + "|"]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows]) + "\n"


def model_phrase(model: dict[str, Any]) -> str:
    """The model of a report: its name and the beginning of its weights' sha256, or that it is random; its shape."""
    name = f"{model['name']} (weights {model['weights_sha256'][:12]})" if "name" in model else "Random Llama"
    return (
        f"{name}, {model['num_hidden_layers']} layers, d {model['hidden_size']}, {model['num_attention_heads']} query "
        f"and {model['num_key_value_heads']} KV heads, head_dim {model['head_dim']}"
    )


def generate_markdown(data: dict[str, Any]) -> str:
    """The report of `bench generate`: one table per cell, ratios to the anchor in its default setting."""
    model = data["model"]
    parts = [
        "# generate(): speed and memory\n",
        *_origin(data),
        f"{model_phrase(model)}, {model['parameters'] / 1e6:.3g}M parameters, {model['dtype']}; "
        f"{data['new_tokens']} new tokens; budget "
        f"{data['budget']}; medians of {data['repeats']} repetitions in turns. Peak: resident memory above what the "
        f"process held before the run. Peer: {data['peer']}.\n",
    ]
    cells = dict.fromkeys((r["batch"], r["prompt"]) for r in data["results"])
    for batch, prompt in cells:
        rows = [r for r in data["results"] if (r["batch"], r["prompt"]) == (batch, prompt)]
        parts += [
            f"## Batch {batch}, prompt {prompt:,}\n",
            generate_table(rows, data["anchor"], data.get("anchor_setting", ANCHOR_SETTING)),
        ]
    return "\n".join(parts)


def generate_table(rows: Sequence[dict[str, Any]], anchor: str, setting: str = ANCHOR_SETTING) -> str:
    """One cell: prefill, decoding and its ratio to the anchor, bytes really held, peak memory."""
    base = next((r["decode_ms"] for r in rows if (r["name"], r["setting"]) == (anchor, setting)), None)
    head = ("cache", "setting", "prefill s", "decode ms/step", "speed-up", "KV MB held", "peak MB")
    return markdown_table(head, [_generate_row(row, base) for row in rows])


def _generate_row(row: dict[str, Any], base: float | None) -> tuple[str, ...]:
    if row["decode_ms"] is None:
        return (row["name"], row["setting"], row.get("failure") or "not run", "", "", "", "")
    ratio = f"{base / row['decode_ms']:.2f} x" if base and row["decode_ms"] else ""
    peak = f"{row['peak_bytes'] / 1e6:.0f}" if row["peak_bytes"] is not None else ""
    return (
        row["name"],
        row["setting"],
        f"{row['prefill_s']:.2f}",
        f"{row['decode_ms']:.1f}",
        ratio,
        f"{row['kv_bytes'] / 1e6:.1f}",
        peak,
    )


def kernels_markdown(data: dict[str, Any]) -> str:
    """The report of `bench kernels`."""
    rows = [
        (
            r["name"],
            f"{r['ms']:.3f}",
            f"{r['gb_per_s']:.1f}" if r["gb_per_s"] else "",
            f"{r['share']:.0%}",
            r["of"],
            r.get("verdict", ""),
        )
        for r in data["results"]
    ]
    head = ("kernel", "ms", "GB/s", "share", "of", "target")
    note = (
        f"Medians of {data['rounds']} rounds in turns; share: speed over that of the yardstick, over codes the median "
        "of the ratios within a round.\n"
    )
    return "\n".join(["# Kernels\n", *_origin(data), note, markdown_table(head, rows)])


def stream_markdown(data: dict[str, Any]) -> str:
    """The report of `bench stream`: a row per stretch of the text."""
    head = ("method", "tokens seen", "us/step", "entries per head", "KV kB", "pool kB", "resident MB")
    rows = [
        (
            r["method"],
            f"{r['seen']:,}",
            f"{r['step_us']:.0f}",
            str(r["stored"]),
            f"{r['kv_bytes'] / 1e3:.1f}",
            f"{r['reserved_bytes'] / 1e3:.0f}",
            f"{(r['resident_bytes'] or 0) / 1e6:.0f}",
        )
        for r in data["results"]
    ]
    note = (
        f"{data['tokens']:,} random tokens, one at a time, through a {data['model']['type']} of "
        f"{data['model']['parameters']:,} parameters; budget {data['budget']} entries per head; medians per stretch.\n"
    )
    return "\n".join(["# Endless text\n", *_origin(data), note, markdown_table(head, rows)])


def methods_markdown(data: dict[str, Any]) -> str:
    """The report of `bench methods`: a row per method, ratios to the anchor, and whether the bounds hold."""
    model, anchor, bound = data["model"], data["anchor"], data["plan_bound"]
    head = (
        "method",
        "while decoding",
        "prefill s",
        f"of {anchor}",
        "plan",
        f"<= {bound:.0%}",
        "decode ms/step",
        f"of {anchor}",
        "at most",
        "holds",
        "KV MB held",
        "extra input",
    )
    note = (
        f"Random Llama, {model['parameters'] / 1e6:.3g}M parameters ({model['num_hidden_layers']} layers, d "
        f"{model['hidden_size']}, {model['num_attention_heads']} query and {model['num_key_value_heads']} KV heads, "
        f"head_dim {model['head_dim']}, tied), {model['dtype']}; prompt {data['prompt']:,}, {data['new_tokens']} new "
        f"tokens; budget {data['budget']}; medians of {data['repeats']} repetitions, each with fresh caches. "
        f"Decoding goes in turns of a few steps, each compared with those of {anchor} before and behind it. "
        f"{_noise(data)}"
        "Prefill lasts to the first token, and to the end of the prompt's plan where that comes later. The plan is "
        "scoring, choosing and writing what stays, as a share of the prefill. A step carries its part of what is done "
        f"every few steps.{'' if data['prompt'] >= BOUNDS_FROM else SHORT}\n"
    )
    left_out = [f"* Left out: `{method['name']}`: {method['reason']}" for method in data["left_out"]]
    return (
        "\n".join(
            [
                "# Methods: what they cost\n",
                *_origin(data),
                note,
                markdown_table(head, map(_method_row, data["results"])),
                _tally(data["results"]),
                *left_out,
            ]
        ).rstrip()
        + "\n"
    )


def _noise(data: dict[str, Any]) -> str:
    """What the anchor once more, which decodes exactly as the anchor does, came out at."""
    for row in data["results"]:
        if row["again"] and row["decode_ratio"] is not None:
            low, high = row["decode_ratio_range"]
            return (
                f"{data['anchor']} compared with itself is {row['decode_ratio']:.3f} x, {low:.3f} to {high:.3f} over "
                "the repetitions: the noise. "
            )
    return ""


def _method_row(row: dict[str, Any]) -> tuple[str, ...]:
    name = f"`{row['name']}{':' if row['setting'] else ''}{row['setting']}`"
    if row["prefill_s"] is None:
        return (name, row["kind"], row.get("failure") or "not run", *[""] * 9)
    bound = "" if row["decode_bound"] is None else f"{row['decode_bound']:.2f} x"
    extra, repeats = row["extra_passes"], "the prompt is repeated: " if row["repeats_prompt"] else ""
    beside = f"{repeats}{extra} extra pass{'es' if extra > 1 else ''}" if extra else ""
    return (
        name,
        row["kind"],
        f"{row['prefill_s']:.2f}",
        _times(row["prefill_ratio"]),
        f"{row['plan_share']:.1%}",
        _verdict(row["plan_holds"]),
        f"{row['decode_ms']:.2f}",
        _times(row["decode_ratio"]),
        bound,
        _verdict(row["decode_holds"]),
        f"{row['kv_bytes'] / 1e6:.1f}",
        "; ".join(filter(None, [beside, row["given"]])),
    )


def _times(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.2f} x"


def _verdict(holds: bool | None) -> str:
    return {True: "yes", False: "**no**", None: ""}[holds]


def _tally(rows: Sequence[dict[str, Any]]) -> str:
    """How many bounds hold, and how many methods did not run."""
    counts = [
        f"{sum(row[key] is True for row in rows)} of {sum(row[key] is not None for row in rows)} {what}"
        for key, what in (("decode_holds", "decode times"), ("plan_holds", "plans"))
    ]
    failed = sum(row["prefill_s"] is None and not row["again"] for row in rows)
    return f"Within their bounds: {' and '.join(counts)}. Failed: {failed}.\n"


def _origin(data: dict[str, Any]) -> list[str]:
    return [f"{data['hardware']}. {data['software']}.\n", f"Made by `{data['command']}`.\n"]
