"""Tables of stored texts: what the codec `transform` loses and takes, by model and length."""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from typing import Any

from generated.markup import left
from generated.results import RESULTS
from generated.text_tables import mean_and_error
from millpond_lab.bench.common.report import markdown_table

#: Texts of the kinds that the shipped files were calibrated on, and of other kinds, with their names in a table.
SEEN = {"wiki": "WikiText-2", "novel": "novel", "cpp": "C++ documentation"}
UNSEEN = {"rust": "Rust book", "shakespeare": "Shakespeare", "maths": "GSM8K"}


def storage_tables() -> str:
    """KL and bytes of stored texts, a table for each model and length."""
    groups: dict[tuple[str, str, int], dict[str, dict[str, list[dict[str, Any]]]]] = defaultdict(
        lambda: defaultdict(lambda: defaultdict(list))
    )
    for line in (RESULTS / "storage-codec.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        file = row["calibration"].split(" ")[0]
        codec = f"`{row['codec']}`" + (f", {file}" if file not in ("", "shipped") else "")
        groups[row["model"], row["dtype"], row["prompt"]][codec][row["text"]].append(row)
    return "\n".join(_table(*key, codecs) for key, codecs in sorted(groups.items()))


def _table(model: str, dtype: str, prompt: int, codecs: dict[str, dict[str, list[dict[str, Any]]]]) -> str:
    texts = [name for name in (*SEEN, *UNSEEN) if any(name in found for found in codecs.values())]
    head = ("codec", "bytes", *(SEEN.get(name) or UNSEEN[name] for name in texts), "mean of the first three")
    rows = []
    for codec, found in codecs.items():
        share = statistics.mean(row["bytes"] for part in found.values() for row in part)
        cells = [_cell([row["kl"] for row in found.get(text, ())]) for text in texts]
        means = [statistics.mean(row["kl"] for row in found[text]) for text in SEEN if text in found]
        rows.append((codec, f"{share:.1%}", *cells, f"{statistics.mean(means):.4f}" if len(means) == len(SEEN) else ""))
    counts = {len(part) for found in codecs.values() for part in found.values()}
    windows = f"{min(counts)} to {max(counts)} windows" if len(counts) > 1 else "one window"
    if len(counts) == 1 and counts != {1}:
        windows = f"{min(counts)} windows"
    return f"{model} in {dtype}, {prompt:,} tokens, {windows} of each text:\n\n{left(markdown_table(head, rows))}"


def _cell(numbers: list[float]) -> str:
    return mean_and_error(numbers) if len(numbers) > 1 else "".join(f"{number:.4f}" for number in numbers)


def storage_eviction() -> str:
    """KL and bytes of evicted caches, stored as they are and in codes."""
    lines = (RESULTS / "storage-eviction.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    head = ("setting", "bytes", *SEEN.values(), "to the same cache, not stored")
    table = []
    for setting in sorted({row["codec"] for row in rows}):
        own = [row for row in rows if row["codec"] == setting]
        cells = [_cell([row["kl"] for row in own if row["text"] == text]) for text in SEEN]
        share = statistics.mean(row["bytes"] for row in own)
        pairs = [row["pair"] for row in own if "pair" in row]
        table.append((f"`{setting}`", f"{share:.1%}", *cells, f"{statistics.mean(pairs):.4f}" if pairs else ""))
    (about,) = {(row["model"], row["dtype"], row["prompt"]) for row in rows}
    counts = {
        sum(row["codec"] == setting and row["text"] == text for row in rows)
        for setting, text in {(row["codec"], row["text"]) for row in rows}
    }
    windows = f"{min(counts)} to {max(counts)} windows" if len(counts) > 1 else f"{max(counts)} windows"
    said = f"{about[0]} in {about[1]}, {about[2]:,} tokens, {windows} of a text:"
    return f"{said}\n\n{left(markdown_table(head, table))}"


def storage_facts() -> str:
    """Facts that stored texts and evicted caches still give, of those that the full cache gives, by model."""
    rows = [json.loads(line) for line in (RESULTS / "storage-facts.jsonl").read_text(encoding="utf-8").splitlines()]
    parts = []
    for model, dtype in sorted({(row["model"], row.get("dtype", "bfloat16")) for row in rows}):
        own = [row for row in rows if (row["model"], row.get("dtype", "bfloat16")) == (model, dtype)]
        full = {row["number"]: row["stated"] for row in own if row["setting"] == "full"}
        outside = {row["number"]: row["outside"] for row in own if row["outside"]}
        table = []
        for setting in dict.fromkeys(row["setting"] for row in own):
            found = [row for row in own if row["setting"] == setting and row["number"] in full]
            asked = [
                (stated, apart)
                for row in found
                for stated, whole, apart in zip(
                    row["stated"], full[row["number"]], outside.get(row["number"], [True] * 8), strict=True
                )
                if whole
            ]
            apart = [stated for stated, outside_all in asked if outside_all]
            share = statistics.mean(row["bytes"] for row in found)
            table.append(
                (
                    f"`{setting}`",
                    f"{share:.1%}",
                    f"{sum(stated for stated, _ in asked)} of {len(asked)}",
                    f"{sum(apart)} of {len(apart)}",
                )
            )
        lengths = [row["tokens"] for row in own]
        head = ("setting", "bytes", "facts", "of these, no token of the answer is exact in any layer")
        parts.append(
            f"{model} in {dtype}, {8 * len(full)} facts in texts of {min(lengths):,} to {max(lengths):,} tokens, "
            f"counted where the full cache states them:\n\n{left(markdown_table(head, table))}"
        )
    return "\n".join(parts)
