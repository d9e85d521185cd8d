"""Tables and figures of the text models on the page about retaining heads, from committed rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from generated.markup import left
from generated.results import read
from millpond_lab.bench.common.report import markdown_table

#: Methods that evict while they decode; the others keep what follows the prompt.
EVICTS = {
    "attention_gate:window=102",
    "streaming",
    "window",
    "h2o:recent=0.8",
    "locret:compete=layer:decode=evict:recent=102",
    "ada:score=snapkv/decode=evict",
}
#: Gates take no budget: the column in which the bytes that they keep belong, and what is said of them.
GATES = {
    "attention_gate:window=102": ("20%", ", which says itself how much stays"),
    "attention_gate": ("10%", ", the newest 16 entries"),
}
NOTES = {name: note for name, (_, note) in GATES.items()} | {"kvzip": ", which reads the context twice"}
PERPLEXITIES = ("long-text", "long-ada", "long-streaming", "text-ada")
SHARES = ("long-recall", "long-keydiff", "recall", "keydiff")


def retaining_tables() -> dict[str, str]:
    """The tables of the page by the names of their places."""
    return {"pond-text-long": text_table(), "pond-text-long facts": facts_table()}


def text_table() -> str:
    """Perplexities of running text, and differences from `ada` and `streaming`."""
    pairs = {anchor: {row["method"]: row for row in rows(f"long-{anchor}")} for anchor in ("ada", "streaming")}
    body = []
    for row in rows("long-text"):
        method = row["method"]
        full = method == "full"
        name, after = ("full cache", "") if full else (f"`{method}`", "evicts" if method in EVICTS else "keeps")
        more = ("" if full or method == anchor else difference(found[method]) for anchor, found in pairs.items())
        body.append((name, after, f"{row['perplexity']:.2f}", *more))
    head = ("`pond-text-long`", "after the prompt", "perplexity", *(f"more than `{anchor}`" for anchor in pairs))
    return left(markdown_table(head, body))


def facts_table() -> str:
    """Shares of facts that are told with a fifth and a tenth of the entries."""
    cells: dict[str, dict[str, str]] = {}
    for row in rows("long-recall"):
        method, score = row["method"], row["score"]
        budget = GATES[method][0] if method in GATES else row["budget"]
        shown = f"{score['mean']:.3f} ({score['low']:.2f} to {score['high']:.2f})"
        cells.setdefault(method, {})[budget] = shown
    del cells["full"]
    body = [
        (f"`{method}`{NOTES.get(method, '')}", *(found.get(budget, "") for budget in ("20%", "10%")))
        for method, found in cells.items()
    ]
    return left(markdown_table(("`pond-text-long`", "20 % of the entries", "10 %"), body))


def difference(row: dict[str, Any]) -> str:
    """A difference in percent and its interval, which has signs where a part of it is below zero."""
    more, low, high = (round(100 * row[name], 1) + 0.0 for name in ("more", "low", "high"))
    interval = f"{low:+.1f} to {high:+.1f}" if low < 0 else f"{low:.1f} to {high:.1f}"
    return f"{more:+.1f}% ({interval})"


def retaining_figures() -> dict[str, float]:
    """The figures of the page's sentences by name; differences of perplexities and bytes in hundredths."""
    return dict(figures())


def figures() -> Iterator[tuple[str, float]]:
    for result in PERPLEXITIES:
        for row in rows(result):
            name = f"{result} {row['method']}"
            yield f"{name} perplexity", row["perplexity"]
            yield from ((f"{name} {field}", 100 * row[field]) for field in ("more", "low", "high", "bytes"))
    for result in SHARES:
        for row in rows(result):
            name = " ".join(filter(None, (result, row["method"], row["budget"])))
            yield f"{name} bytes", 100 * row["bytes"]
            for field in ("score", "difference"):
                yield from ((f"{name} {field} {part}", row[field][part]) for part in ("mean", "low", "high"))


def rows(result: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = read(f"retain-pond-{result}")
    return found
