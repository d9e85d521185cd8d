"""Tables and figures of the page about quality, from the committed rows of evaluations."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from generated.results import RESULTS, read
from millpond_lab.bench.common.report import markdown_table
from millpond_lab.evals.decoding.record import SummaryRow
from millpond_lab.evals.harness.summary import read_rows
from millpond_lab.evals.report.claims import ClaimResult, read_findings

QUALITY = RESULTS / "quality"
PROTOCOLS = ("aware", "agnostic")
TASKS = ("recall", "niah_multivalue", "tracking", "copy", "frequent_words")
#: Rows of the table of H2O's parts: a label, and the settings that share the row.
PARTS = (
    ("`full`", ("full",), "auto"),
    ("`full`, int4", ("full",), "int4"),
    ("`h2o`: both halves", ("h2o",), "auto"),
    ("`h2o`, int4", ("h2o",), "int4"),
    ("average per query (`average=true`)", ("h2o:average=true",), "auto"),
    ("forgetting, by half in 69 tokens (`decay=0.99`)", ("h2o:decay=0.99",), "auto"),
    ("forgetting, by half in 7 tokens (`decay=0.9`)", ("h2o:decay=0.9",), "auto"),
    ("local statistics (`prefill=greedy`)", ("h2o:prefill=greedy",), "auto"),
    ("heavy only (`recent=0:sinks=0`)", ("h2o:recent=0:sinks=0",), "auto"),
    ("recent only (`window`)", ("window",), "auto"),
    ("the heaviest masked (`no_heavy`)", ("no_heavy",), "auto"),
    ("`strided`, `fixed` of sparse attention", ("strided", "fixed"), "auto"),
    ("`window` and its first four", ("window:sinks=4",), "auto"),
    ("`random` with the first, without", ("random", "random:sinks=0"), "auto"),
)
#: Methods of the table of texts, by what they are called there.
TEXTS = {
    "oracle": "oracle",
    "ada": "ada:score=snapkv/kernel=7",
    "snapkv": "snapkv:kernel=7",
    "streaming": "streaming",
    "window": "window",
    "h2o:recent=0.8": "h2o:recent=0.8",
    "h2o": "h2o",
    "no_heavy": "no_heavy",
    "random": "random",
}
LENGTHS = ("1024", "3584")
#: Pairs of which the page says that no difference is seen; it says of all others that the first is ahead.
UNSEEN = {("h2o", "random:recent=0.5", protocol) for protocol in PROTOCOLS}
AHEAD = {
    *(("h2o", "window", protocol) for protocol in PROTOCOLS),
    *(("h2o:decay=0.9", "window", protocol) for protocol in PROTOCOLS),
    ("h2o:decay=0.9", "h2o", "aware"),
}


def quality_tables() -> dict[str, str]:
    """The tables of the page by the names of their places."""
    return {"texts": texts_table(), "facts": facts_table(), "parts": parts_table()}


def parts_table() -> str:
    """Scores of H2O and its parts by task."""
    scores = {(row.method, row.codec, task_of(row)): row.score for row in read_rows(RESULTS / "h2o-parts")}
    body = [
        (label, *(", ".join(f"{scores[method, codec, task]:.2f}" for method in methods) for task in TASKS))
        for label, methods, codec in PARTS
    ]
    return markdown_table(("method", *TASKS), body)


def texts_table() -> str:
    """How much higher perplexities of a text are than the full cache's, at two lengths."""
    found = {(row.method, length_of(row)): row.score for row in read_rows(QUALITY / "text-long")}
    full = [found["full", length] for length in LENGTHS]
    body = [
        (f"`{label}`", *(f"{100 * (found[method, length] / found['full', length] - 1):+.1f} %" for length in LENGTHS))
        for label, method in TEXTS.items()
    ]
    head = ("20 %", *(f"{int(length):,} tokens" for length in LENGTHS))
    return markdown_table(head, [("full cache, perplexity", *(f"{score:.2f}" for score in full)), *body])


def facts_table() -> str:
    """By layer of `pond-recall`: attention to a fact, its rank, how often it is kept, and recall if it always is."""
    head, columns = ["layer"], []
    for study in studies():
        head += [f"{study['protocol']}: attention", "smaller sums", "kept", "recall if protected"]
        forced = {row["stays in"]: row for row in study["forced"]}
        columns.append(
            [
                (
                    f"{100 * layer['later attention']:.1f} %",
                    f"{100 * layer['below'][1]:.0f} %",
                    share(layer["kept"]),
                    share(forced[f"layer {layer['layer']}"]),
                )
                for layer in study["layers"]
            ]
        )
    body = [(str(layer), *aware, *agnostic) for layer, (aware, agnostic) in enumerate(zip(*columns, strict=True))]
    return markdown_table(head, body).replace("|---|", "|---:|", 1)


def share(row: dict[str, float]) -> str:
    return f"{row['mean']:.2f} ({row['low']:.2f} to {row['high']:.2f})"


def quality_figures() -> dict[str, float]:
    """The figures of the page's sentences by name; scores as shares, differences and losses in hundredths.

    Raises:
        SystemExit: a sentence no longer holds.
    """
    findings = read_findings(QUALITY / "orderings.json")
    check_pairs(findings)
    check_layers()
    figures: dict[str, float] = {}
    for protocol in PROTOCOLS:
        figures |= leaderboard_figures(protocol, read_rows(QUALITY / protocol))
    for protocol, folder in zip(PROTOCOLS, ("h2o-parts", "h2o-parts-agnostic"), strict=True):
        for row in read_rows(RESULTS / folder):
            if row.codec == "auto":
                figures |= interval(f"parts {protocol} {row.method} {task_of(row)}", row.score, row.low, row.high)
    for name in ("text", "text-long"):
        rows = read_rows(QUALITY / name)
        full = {length_of(row): row.score for row in rows if row.method == "full"}
        for row in rows:
            figures[f"{name} {row.method} {length_of(row)}"] = 100 * (row.score / full[length_of(row)] - 1)
    for one in findings:
        if one.peer == "millpond":
            name = f"{one.first} over {one.second} {one.protocol} {one.budget}"
            figures |= interval(name, 100 * one.mean, 100 * one.low, 100 * one.high)
    return figures | dict(fact_figures())


def leaderboard_figures(protocol: str, rows: Sequence[SummaryRow]) -> dict[str, float]:
    """Scores of methods by task, with intervals, and over the tasks their mean, least and most."""
    figures: dict[str, float] = {}
    scores: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        peer = "" if row.peer == "millpond" else "kvpress "
        method = f"{protocol} {peer}{row.method.partition(':')[0] if peer else row.method}"
        scores[method].append(row.score)
        figures |= interval(f"{method} {task_of(row)}", row.score, row.low, row.high)
    for method, found in scores.items():
        require(len(found) == 10, f"that {method} has ten tasks")
        mean = sum(found) / len(found)  # as on the leaderboard
        figures |= {f"{method} mean": mean, f"{method} least": min(found), f"{method} most": max(found)}
    return figures


def fact_figures() -> Iterator[tuple[str, float]]:
    """Of each layer the share of attention and of smaller sums; recall by where the fact is protected."""
    for study in studies():
        protocol = study["protocol"]
        for layer in study["layers"]:
            name = f"fact {protocol} layer {layer['layer']}"
            yield f"{name} attention", 100 * layer["later attention"]
            yield f"{name} smaller", 100 * layer["below"][1]
        for row in study["forced"]:
            name, more = f"fact {protocol} in {row['stays in']}", row["more"]
            yield from interval(name, row["mean"], row["low"], row["high"]).items()
            yield from interval(f"{name} more", 100 * more["mean"], 100 * more["low"], 100 * more["high"]).items()


def interval(name: str, value: float, low: float, high: float) -> dict[str, float]:
    return {name: value, f"{name} low": low, f"{name} high": high}


def studies() -> Sequence[dict[str, Any]]:
    """Where `pond-recall` looks facts up, in each protocol."""
    found: Sequence[dict[str, Any]] = read("fact-layer")["found"]
    return found


def task_of(row: SummaryRow) -> str:
    return row.task.partition(":")[0]


def length_of(row: SummaryRow) -> str:
    return row.task.partition("context_len=")[2].partition(":")[0]


def check_pairs(findings: Sequence[ClaimResult]) -> None:
    """Whether each pair differs as the page says, over all budgets."""
    verdicts = {
        (one.first, one.second, one.protocol): one.difference.verdict
        for one in findings
        if one.peer == "millpond" and one.budget == "all"
    }
    for pair in UNSEEN:
        require(verdicts[pair] == "no difference seen", f"that no difference is seen between {pair}")
    for pair in AHEAD:
        require(verdicts[pair] == "holds", f"that the first is ahead in {pair}")


def check_layers() -> None:
    """Whether layer 1 alone decides that a fact is recalled."""
    for study in studies():
        forced = {row["stays in"]: row for row in study["forced"]}
        decides = forced.pop("layer 1"), forced.pop("all layers")
        require(all(row["mean"] == 1.0 for row in decides), "that every fact protected in layer 1 is recalled")
        require({row["mean"] for row in forced.values()} == {forced["none"]["mean"]}, "that no other layer matters")
        attention = [layer["later attention"] for layer in study["layers"]]
        require(max(attention[:1] + attention[2:]) < 0.01, "that all layers but 1 give a fact less than 1 %")
        below = study["layers"][1]["below"][1]
        require((below < 0.5) == (study["protocol"] == "agnostic"), "that a fact's sum is below the median beforehand")


def require(holds: bool, sentence: str) -> None:
    if not holds:
        raise SystemExit(f"docs/explanation/quality.md says {sentence}; the committed rows say otherwise")
