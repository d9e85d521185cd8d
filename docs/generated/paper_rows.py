"""Rows on a real model about papers: number formats, FastGen, KVMerger and FlexGen's sparse values."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from generated.markup import left
from generated.results import read
from generated.text_tables import mean_and_error, texts_table
from millpond_lab.bench.common.report import markdown_table

FROM = "`benchmarks/quality/paper_rows.sh {part}`"


def format_tables() -> str:
    """KL of ThinK's and KVQuant's formats, and of MiKV's beside `h2o` without it."""
    return texts_table("codec-papers", "paper_rows.sh")


def format_figures() -> dict[str, float]:
    """The figures of sentences about these formats by name: KL over all windows, and bytes in hundredths."""
    return dict(_figures(read("codec-papers")["rows"]))


def profiles_section() -> str:
    """What FastGen keeps where it measures its heads at each turn, and once."""
    report = read("fastgen-profiles")
    rows = report["rows"]
    texts = list(rows[0]["kl"]["auto"])
    body = []
    for row in rows:
        _, *options = row["method"].split(":")
        kl = row["kl"]["auto"]
        body.append((f"`{', '.join(options)}`", f"{row['bytes']['auto']:.1%}", *(mean_and_error(kl[t]) for t in texts)))
    first, once = rows
    if once["bytes"]["auto"] >= first["bytes"]["auto"] or _mean_kl(once) <= _mean_kl(first):
        raise SystemExit("fastgen's page says that once holds less and loses more; the committed rows say otherwise")
    part = first["prompt"] // first["turns"]
    return (
        "## Measured at each turn, and once\n\n"
        f"{first['model']}: {first['windows']} windows of each text, read as {first['turns']} turns of {part:,} "
        f"tokens, and {first['scored']} more: KL from the full cache in nats a token, mean and standard error, and "
        f"bytes held ({FROM.format(part='turns')}, {report['machine']['cpu']}).\n\n"
        f"{left(markdown_table(('options', 'bytes', *texts), body))}\n"
        "Measured once, heads hold less and lose more.\n"
    )


def thresholds_section() -> str:
    """What KVMerger leaves of texts with thresholds of layers that were measured on another one."""
    report = read("merge-thresholds")
    rows, eps = report["rows"], report["eps"]
    by_text: dict[str, dict[str, dict[str, Any]]] = {}
    for row in rows:
        by_text.setdefault(row["text"], {})[row["thresholds"]] = row
    body = []
    for text, found in by_text.items():
        layer, head = found["layer"], found["head"]
        windows = layer["left in windows"]
        body.append(
            (
                text,
                f"{statistics.mean(windows):.1%} ({min(windows):.1%} to {max(windows):.1%})",
                f"{min(layer['left']):.1%} to {max(layer['left']):.1%}",
                mean_and_error(layer["kl"]),
                f"{statistics.mean(head['left in windows']):.1%}",
                mean_and_error(head["kl"]),
            )
        )
    pairs = [pair for found in by_text.values() for pair in zip(found["layer"]["kl"], found["head"]["kl"], strict=True)]
    less = sum(layer < head for layer, head in pairs)
    if 2 * less <= len(pairs):
        raise SystemExit("kvmerger's page says that thresholds of layers lose less; the committed rows say otherwise")
    head_line = ("text", "layers: left (windows)", "by layer", "layers: KL", "heads: left", "heads: KL")
    return (
        "## Thresholds of layers, measured on another text\n\n"
        f"The thresholds of {report['model']}'s layers at which half of {report['calibrated on']} is left are "
        f"{min(eps):.2f} to {max(eps):.2f}. "
        "With them no budget holds (`layers`); with a threshold of each head it does "
        '(`heads`, `eps="auto"` at 50 %). '
        f"{report['windows']} windows of each text, {report['prompt']:,} tokens and {report['scored']} more: entries "
        "left, and KL from the full cache in nats a token, mean and standard error "
        f"({FROM.format(part='merging')}, {report['machine']['cpu']}).\n\n"
        f"{left(markdown_table(head_line, body))}\n"
        f"Thresholds of layers lose less in {less} of {len(pairs)} windows.\n"
    )


def sparse_values_table() -> str:
    """KL of decoding steps that read the values of some entries."""
    report = read("sparse-values")
    rows = report["rows"]
    texts = list(rows[0]["kl"])
    body = [
        (f"`{row['share']:g}`", f"{row['bytes']:.1%}", *(mean_and_error(row["kl"][text]) for text in texts))
        for row in rows
    ]
    return (
        f"{report['model']} in bfloat16: {report['windows']} windows of each text, {report['scored']} decoding steps "
        f"behind {report['prompt']:,} tokens, all layers as on the host: bytes of keys and values that the steps read, "
        "as a share of all, and KL from steps that read all in nats a token, mean and standard error "
        f"({FROM.format(part='values')}, {report['machine']['cpu']}).\n\n"
        f"{left(markdown_table(('values', 'bytes read', *texts), body))}"
    )


def _mean_kl(row: dict[str, Any]) -> float:
    return statistics.mean(one for text in row["kl"]["auto"].values() for one in text)


def _figures(rows: Sequence[dict[str, Any]]) -> Iterator[tuple[str, float]]:
    for row in rows:
        method = "" if row["method"] == "full" else f"{row['method']} "
        for codec, kl in row["kl"].items():
            yield f"{method}{codec} kl", statistics.mean(one for text in kl.values() for one in text)
            yield f"{method}{codec} bytes", 100 * row["bytes"][codec]
