"""What trained heads and gates keep, on the pages of `locret` and `attention_gate`."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from itertools import chain

from generated.results import RESULTS, read
from millpond.budget import Budget
from millpond_lab.bench.common.report import markdown_table
from millpond_lab.evals.decoding.record import SummaryRow
from millpond_lab.evals.harness.summary import read_notes, read_rows
from millpond_lab.evals.report.curves import curves_of

LOCRET = RESULTS / "locret"
GATE, GATE_INSIDE, GATE_GLOBAL = RESULTS / "gate", RESULTS / "gate-inside", RESULTS / "gate-global"


def trained_section() -> str:
    """What the retaining heads of pond-recall keep beside keydiff, from committed results."""
    intro = (
        "The heads that come with the package were trained on texts of the same families, from the random stream that "
        "the model itself was trained on, which no task reads "
        "([card](../../../src/millpond/models/heads/pond-recall.md)); `keydiff` needs no training. "
        "The context is compressed before any question is seen."
    )
    parts = [f"## With trained heads, beside `keydiff`\n\n{intro}\n"]
    once, chunks, seeds = [LOCRET / "once"], [LOCRET / "chunks"], sorted((LOCRET / "seeds").iterdir())
    for folders, what in (
        (once, "Compressed once"),
        (chunks, "Evicting while the prompt is read"),
        (seeds, "Three trainings"),
    ):
        rows, (note, *_) = [row for folder in folders for row in read_rows(folder)], read_notes(folders[0])
        machine = f"{note['hardware']}, {note['software']}"
        parts += [f"### {what}\n", trained_table(rows), f"{trained_note(rows)} {machine}.\n"]
        if folders is chunks:
            parts.append(chunk_sentence(rows))
    parts.append(
        "`seed1` and `seed2` were trained as the heads of the package were, with other seeds of weights and texts.\n"
    )
    parts += ["### Facts of a kind that training left out\n", left_out_table()]
    parts += ["### Overlap with the best tenth\n", overlap_section()]
    parts += ["### The same heads in kvpress\n", kvzap_section()]
    results = "../../../benchmarks/results/locret"
    parts.append(f"From `benchmarks/quality/locret.sh` ([results]({results}/once/summary.md)).\n")
    return "\n".join(parts)


def chunk_sentence(rows: Sequence[SummaryRow]) -> str:
    """How far the scores of `locret` lie apart with chunks of different sizes."""
    scores: dict[str, list[float]] = {}
    for row in rows:
        if row.method.startswith("locret"):
            scores.setdefault(row.task, []).append(row.score)
    most = max(100 * (max(found) - min(found)) for found in scores.values())
    return f"With `locret` the sizes of chunks are at most {most:.1f} points apart in any task.\n"


def kvzap_section() -> str:
    """The heads in the form of kvpress's KVzapPress beside locret, from committed results."""
    rows = [row for folder in ("once", "kvzap") for row in read_rows(LOCRET / folder) if row.method != "keydiff"]
    intro = (
        "kvpress's `KVzapPress` loads a network by the name of the model, of a form into which the heads can be turned "
        "(`benchmarks/peers/kvzap_weights.py`): it scores a layer's input, and with GELU in place of SiLU, which gives "
        "nearly the same order. It keeps neither first nor newest entries by rule. "
        "kvpress's other trained presses take no file: `DuoAttentionPress` fetches the numbers of six models, or "
        "profiles the heads itself, and `FastKVzipPress` fetches gates by the model's name."
    )
    return f"{intro}\n\n{trained_table(rows)}\n{trained_note(rows)}\n"


def overlap_section() -> str:
    """How far any score can find the best tenth before the questions are known, from a committed result."""
    found = read("label-overlap")
    means = {name: statistics.mean(chain(*layers)) for name, layers in found["overlaps"].items()}
    text = (
        "The card says how many of the tenth of the entries with the highest labels the heads choose: "
        f"{means['heads_all']:.2f} here. A label is the largest attention of any question, and the questions are not "
        f"known when a score is given. The same questions in reverse order share {means['order_all']:.2f} of their "
        f"best tenth, and the two halves of the questions about a text {means['other']:.2f}: of what one half wants "
        f"most the heads find {means['heads']:.2f}. A score that is given before the questions cannot be expected to "
        "find far more than these agree in; a mean over many sets of questions may come nearer, which was not "
        "measured. Where order matters least, in layer 1, the heads find most."
    )
    table = (RESULTS / "label-overlap.md").read_text(encoding="utf-8")
    return (
        f"{text}\n\n{table}\n`{found['model']}`: {found['texts']} held-out rows of 256 to 1,024 words. "
        f"{found['hardware']}, {found['software']}. From `benchmarks/quality/label_overlap.py`.\n"
    )


def left_out_table() -> str:
    """Scores in the tasks whose kind of facts no text of training had, beside heads that saw them and keydiff."""
    body = []
    for folder in sorted((LOCRET / "without").iterdir()):
        rows = read_rows(folder)
        for task in dict.fromkeys(row.task for row in rows):
            without, *others = sorted((row for row in rows if row.task == task), key=lambda row: ":" not in row.method)
            shown = {row.method: f"{row.score:.3f} ({row.low:.3f} to {row.high:.3f})" for row in others}
            kinds = folder.name.replace("-", ", ")
            score = f"{without.score:.3f} ({without.low:.3f} to {without.high:.3f})"
            body.append((task.partition(":")[0], kinds, score, shown["locret"], shown["keydiff"]))
    head = ("task", "left out", "heads trained without (95 %)", "heads of the package", "`keydiff`")
    return f"{markdown_table(head, body)}\n{trained_note(rows)} Budget {rows[0].budget}.\n"


def gate_section() -> str:
    """What the gate of pond-recall keeps and how it answers, by task, from committed results."""
    rows, (note, *_) = read_rows(GATE), read_notes(GATE)
    by_task = {(row.method, row.task): row for row in rows}
    inside = {row.task: row for row in read_rows(GATE_INSIDE)}
    less = next(method for method in dict.fromkeys(row.method for row in rows) if "threshold" in method)
    body = []
    for task in dict.fromkeys(row.task for row in rows):
        found = [inside[task], by_task["attention_gate", task], by_task[less, task]]
        parts = [(f"{row.score:.3f} ({row.low:.2f} to {row.high:.2f})", f"{row.kept_share:.1%}") for row in found]
        full = f"{by_task['full', task].score:.3f}"
        body.append((task.partition(":")[0], full, *chain.from_iterable(parts)))
    names = ["`attention_gate`", "`:acts=end`", f"`:acts=end:{less.partition(':')[2]}`"]
    table = markdown_table(("task", "full", *chain.from_iterable((f"{name} (95 %)", "kept") for name in names)), body)
    shares = [row.kept_share for row in inside.values()]
    fewer = [row.kept_share for row in rows if row.method == "attention_gate"]
    more = [row.kept_share for row in rows if row.method == less]
    changed = [task for task, row in inside.items() if row.score != by_task["attention_gate", task].score]
    intro = (
        "It was trained for 10 % of the entries on texts of the same families, dense and sparse ones, from random "
        "streams that no task reads ([card](../../../src/millpond/models/heads/pond-recall-gate.md)). "
        "The context is compressed before any question is seen, and no budget is given. "
        f"By task {min(shares):.1%} to {max(shares):.1%} of the entries are kept with flags inside the prompt and "
        f"{min(fewer):.1%} to {max(fewer):.1%} with flags that act at its end, as in its training; "
        f"{len(inside) - len(changed)} of {len(inside)} tasks have the same score both ways. "
        f"With a lower threshold, which moves all decisions at once, {min(more):.1%} to {max(more):.1%} are kept. "
        "Single texts differ more, as the card says."
    )
    return (
        f"## With the gate of pond-recall\n\n{intro}\n\n"
        f"{table}\n{trained_note(rows)} {note['hardware']}, {note['software']}.\n\n"
        "From `benchmarks/quality/gate.sh` (flags "
        "[inside the prompt](../../../benchmarks/results/gate-inside/summary.md) and "
        "[at its end](../../../benchmarks/results/gate/summary.md)).\n\n"
        f"{global_gate_section()}"
    )


def global_gate_section() -> str:
    """A causal gate and one that sees the whole prompt, trained alike, from committed results."""
    rows, (note, *_) = read_rows(GATE_GLOBAL), read_notes(GATE_GLOBAL)
    kinds = {kind: {row.task: row for row in rows if f"={kind}." in row.method} for kind in ("causal", "global")}
    body = []
    for row in (row for row in rows if row.method == "full"):
        found = [kinds[kind][row.task] for kind in kinds]
        parts = [(f"{one.score:.3f} ({one.low:.2f} to {one.high:.2f})", f"{one.kept_share:.1%}") for one in found]
        body.append((row.task.partition(":")[0], f"{row.score:.3f}", *chain.from_iterable(parts)))
    table = markdown_table(("task", "full", "causal (95 %)", "kept", "global (95 %)", "kept"), body)
    apart = [
        task.partition(":")[0]
        for task, one in kinds["causal"].items()
        if one.high < kinds["global"][task].low or kinds["global"][task].high < one.low
    ]
    verdict = f"Their intervals lie apart in {', '.join(apart)}." if apart else "Their intervals overlap in every task."
    return (
        "### A causal gate and a global one\n\n"
        "Both began with the gate of the package, which is causal, and were trained for 200 steps on the same texts, "
        f"with flags inside the prompt, then calibrated for 10 % on the same sparse texts. {verdict}\n\n"
        f"{table}\n{trained_note(rows)} {note['hardware']}, {note['software']}.\n\n"
        "From `benchmarks/quality/gate_global.sh` "
        "([results](../../../benchmarks/results/gate-global/summary.md)).\n"
    )


def trained_table(rows: Sequence[SummaryRow]) -> str:
    """Shares of the full cache's score with intervals, and the scores by task."""
    tasks = list(dict.fromkeys(row.task for row in rows))
    curves = [(curve.method, point) for curve in curves_of(rows) for point in curve.points]
    scores = {(row.method, row.budget, row.task): row.score for row in rows}
    short = [task.partition(":")[0] for task in tasks]
    body = [
        (
            f"`{method}`",
            point.budget,
            f"{point.share:.1%} ({point.low:.1%} to {point.high:.1%})",
            f"{point.held:.1%}",
            *(f"{scores[method, point.budget, task]:.2f}" for task in tasks),
        )
        for method, point in sorted(curves, key=lambda found: (Budget.parse(found[1].budget).amount, found[0]))
    ]
    return markdown_table(("method", "budget", "of full (95 %)", "bytes of full", *short), body)


def trained_note(rows: Sequence[SummaryRow]) -> str:
    """How the numbers came about."""
    length = rows[0].task.partition("length=")[2]
    counts = sorted({row.n for row in rows})
    asked = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    return f"`{rows[0].model}`: texts of {length} words, {asked} questions a task, seed {rows[0].seed}."
