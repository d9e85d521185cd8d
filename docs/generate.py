"""Write what the documentation takes from code and results: method pages, options, CLI, tables, curves.

Run `python docs/generate.py`, or with --check to compare only: a stale page ends with status 1.
"""

from __future__ import annotations

import inspect
import json
import re
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import typer.main
from api_page import api_page
from gpu_tables import gpu_section
from gpu_tables import read as read_gpu_rows
from papers_page import papers_page

from millpond.bench.common.report import generate_table, markdown_table
from millpond.bench.model_types import page as model_types
from millpond.budget import Budget
from millpond.cli.app import app
from millpond.evals.decoding.record import SummaryRow
from millpond.evals.harness.results import read_notes, read_rows, unite
from millpond.evals.harness.store import SUMMARY
from millpond.evals.report import claims_page
from millpond.evals.report.claim_results import read_findings
from millpond.evals.report.curve_section import quality_section
from millpond.evals.report.curves import CurvePanel, curves_of, panels
from millpond.evals.report.leaderboard import render
from millpond.evals.report.plots.curve import curve_picture, digest, is_current
from millpond.evals.report.plots.style import write
from millpond.evals.task import TASKS
from millpond.install_command import shown_command
from millpond.kernels.decode_rules import Evict
from millpond.markdown import one_per_line
from millpond.methods import METHODS
from millpond.policy.policy import Policy
from millpond.registry import Entry

ROOT = Path(__file__).parent.parent
#: Commands that follow from where the package can be installed from, see `millpond.install_command`.
INSTALLS = re.compile(r"pip install '(?:millpond|\.)\[([\w,-]+)\]'")
NOTE = "<!-- written by docs/generate.py; edit the code instead -->\n"
RESULTS = ROOT / "benchmarks" / "results" / "generate.json"
MODEL_TYPES = ROOT / "benchmarks" / "results" / "model-types.json"
QUALITY = ROOT / "benchmarks" / "results" / "quality"
LOCRET = ROOT / "benchmarks" / "results" / "locret"
OVERLAP = ROOT / "benchmarks" / "results" / "label-overlap.json"
GATE = ROOT / "benchmarks" / "results" / "gate"
CURVES = ("curves-aware", "curves-agnostic")  # on the pages of the methods, not on the leaderboard
CODECS = ROOT / "benchmarks" / "results" / "codecs-text"
PICTURES = ROOT / "docs" / "images" / "quality"
CODEC_TEXTS = ROOT / "benchmarks" / "results" / "codec-texts.json"
CHAT_FACTS = ROOT / "benchmarks" / "results" / "chat-facts.json"
CHOOSE = ROOT / "docs" / "how-to" / "choose-a-method.md"
CODECS_PAGE = ROOT / "docs" / "how-to" / "codecs.md"
GPU_ROWS = ROOT / "benchmarks" / "results" / "gpu-rows.jsonl"
SPEED = ROOT / "docs" / "explanation" / "speed.md"
ORDERINGS = ROOT / "docs" / "explanation" / "orderings.md"


def pages() -> dict[Path, str]:
    """Every generated text by its path."""
    reference = ROOT / "docs" / "reference"
    texts = {reference / "methods" / f"{name}.md": method_page(METHODS.get(name)) for name in METHODS.names()}
    texts[reference / "tasks.md"] = tasks_page()
    texts[reference / "methods" / "README.md"] = f"{NOTE}# Methods\n\n{method_table('')}"
    texts[reference / "cli.md"] = cli_page()
    texts[reference / "models.md"] = NOTE + model_types.render(json.loads(MODEL_TYPES.read_text(encoding="utf-8")))
    texts[reference / "api.md"] = NOTE + api_page()
    texts[reference / "papers.md"] = NOTE + papers_page(method_panels, read_rows(CODECS))
    readme = ROOT / "README.md"
    texts[readme] = fill(readme.read_text(encoding="utf-8"), "saves", savings())
    speed = fill(SPEED.read_text(encoding="utf-8"), "results", result_table())
    texts[SPEED] = fill(speed, "gpu", gpu_section(read_gpu_rows(GPU_ROWS)))
    texts[CODECS_PAGE] = fill(CODECS_PAGE.read_text(encoding="utf-8"), "codec-texts", codec_texts())
    texts[CHOOSE] = fill(CHOOSE.read_text(encoding="utf-8"), "chat-facts", chat_facts())
    texts[ORDERINGS] = ORDERINGS.read_text(encoding="utf-8")
    for name, table in claims_page.tables(read_findings(QUALITY / "orderings.json")).items():
        texts[ORDERINGS] = fill(texts[ORDERINGS], name, table)
    texts[ROOT / "docs" / "leaderboard.md"] = leaderboard_page()  # as `millpond leaderboard` writes it
    for page in [readme, *sorted((ROOT / "docs").glob("how-to/*.md"))]:
        text = texts.get(page) or page.read_text(encoding="utf-8")
        if INSTALLS.search(text):
            texts[page] = INSTALLS.sub(lambda found: shown_command(found[1]), text)
    return {path: one_per_line(text) for path, text in texts.items()}


def pictures() -> dict[Path, Mapping[str, CurvePanel]]:
    """What every generated picture shows, by its path."""
    shown = {PICTURES / f"{name}.svg": method_panels(name) for name in METHODS.names()}
    return {path: found for path, found in shown.items() if found}


@cache
def curve_rows() -> list[SummaryRow]:
    """The committed rows that the curves are made of."""
    return [row for name in CURVES if (QUALITY / name / SUMMARY).exists() for row in read_rows(QUALITY / name)]


def method_panels(name: str) -> Mapping[str, CurvePanel]:
    """The curves of a method by protocol."""
    return panels(curves_of(curve_rows()), name)


def leaderboard_page() -> str:
    """The committed results of evaluations."""
    folders = sorted(file.parent for file in QUALITY.glob(f"*/{SUMMARY}") if file.parent.name not in CURVES)
    rows = unite([row for folder in folders for row in read_rows(folder)])
    return render(rows, [note for folder in folders for note in read_notes(folder)])


def chat_facts() -> str:
    """How many facts of chats each setting states, of those that the full cache states, model by model."""
    report = json.loads(CHAT_FACTS.read_text(encoding="utf-8"))
    models = report["models"]
    settings = [name for name in next(iter(models.values())) if name != "tokens"]
    head = ("setting", *(f"{name}: stated, of the bytes" for name in models))
    rows = [
        (name, *(f"{one[name]['stated']} of {one[name]['of']}, {one[name]['bytes']:.0%}" for one in models.values()))
        for name in settings
    ]
    longest = max(max(one["tokens"]) for one in models.values())
    return (
        f"{report['chats']} chats of up to {longest:,} tokens, {report['machine']['cpu']}, greedy answers, "
        "`benchmarks/quality/chat_facts.py`; counted are the chats whose fact the full cache states.\n\n"
        f"{left(markdown_table(head, rows))}"
    )


def codec_texts() -> str:
    """KL of number formats on windows of several texts, by model and length."""
    report, parts = json.loads(CODEC_TEXTS.read_text(encoding="utf-8")), []
    for row in report["rows"]:
        texts = list(next(iter(row["kl"].values())))
        rows = [
            (f"`{codec}`", f"{row['bytes'][codec]:.1%}", *(mean_and_error(kl[text]) for text in texts))
            for codec, kl in row["kl"].items()
        ]
        parts.append(
            f"{row['model']}, {row['windows']} windows of each text, {row['prompt']:,} tokens and {row['scored']} "
            "more: KL from the full cache in nats a token, mean and standard error "
            f"(`benchmarks/quality/codec_texts.py`, {report['machine']['cpu']}).\n\n"
            f"{left(markdown_table(('format', 'bytes', *texts), rows))}"
        )
    return "\n".join(parts)


def mean_and_error(numbers: Sequence[float]) -> str:
    """The mean of numbers and its standard error."""
    error = statistics.stdev(numbers) / len(numbers) ** 0.5 if len(numbers) > 1 else 0.0
    return f"{statistics.mean(numbers):.4f} ± {error:.4f}"


def fill(text: str, name: str, content: str) -> str:
    """`text` with the part between `<!-- name -->` and `<!-- /name -->` replaced."""
    begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    if begin not in text or end not in text:
        raise SystemExit(f"a page lacks {begin} ... {end}")
    return re.sub(f"{begin}.*?{end}", lambda _: f"{begin}\n{content}\n{end}", text, flags=re.DOTALL)


def method_table(folder: str) -> str:
    """All methods with paper and first line."""
    rows = []
    for name in METHODS.names():
        entry = METHODS.get(name)
        rows.append((f"[`{name}`]({folder}{name}.md)", paper(entry) or "baseline", cell(entry.summary)))
    return left(markdown_table(("method", "paper", "what it keeps"), rows))


def tasks_page() -> str:
    """Every task of `millpond eval` with its options."""
    how = "Options follow the name: `--tasks niah_single:length=2048:variant=2`."
    parts = [f"{NOTE}# Tasks of `millpond eval`\n\n{how}\n"]
    for name in TASKS.names():
        entry = TASKS.get(name)
        source = f"{paper(entry)}\n\n" if entry.paper else ""
        parts.append(f"## `{name}`\n\n{source}{inspect.getdoc(entry.build)}\n")
        parts.append(option_table(entry))
    return "\n".join(parts)


def option_table(entry: Entry[Any]) -> str:
    """The options of a registered builder."""
    rows = [
        (f"`{o.name}`", cell(o.type_name), o.range_text, "" if o.default == "" else f"`{o.default}`", cell(o.help))
        for o in entry.options.values()
    ]
    head = ("option", "type", "range", "default", "what it does")
    return left(markdown_table(head, rows)) if rows else "No options.\n"


def method_page(entry: Entry[Any]) -> str:
    """One method: its docstring, its options, and its curve where there is one."""
    head = f"# `{entry.name}`\n\n" + (f"{paper(entry)}\n\n" if entry.paper else "")
    text = f"{NOTE}{head}{inspect.getdoc(entry.build)}\n\n{in_bytes(entry)}## Options\n\n{options(entry)}"
    quality = quality_section(method_panels(entry.name), curve_rows(), f"../../images/quality/{entry.name}.svg")
    if entry.name == "locret":
        quality += trained_section()
    if entry.name == "attention_gate":
        quality += gate_section()
    return f"{text}\n{quality}" if quality else text


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
    file = OVERLAP
    found = json.loads(file.read_text(encoding="utf-8"))
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
    table = file.with_suffix(".md").read_text(encoding="utf-8")
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
    gates = [method for method in dict.fromkeys(row.method for row in rows) if method != "full"]
    body = []
    for task in dict.fromkeys(row.task for row in rows):
        found = [by_task[method, task] for method in gates]
        parts = [(f"{row.score:.3f} ({row.low:.2f} to {row.high:.2f})", f"{row.kept_share:.1%}") for row in found]
        full = f"{by_task['full', task].score:.3f}"
        body.append((task.partition(":")[0], full, *chain.from_iterable(parts)))
    shares = [[row.kept_share for row in rows if row.method == method] for method in gates]
    (least, most), (less, more) = ((min(found), max(found)) for found in shares)
    names = [f"`{method}`" for method in gates]
    table = markdown_table(("task", "full", *chain.from_iterable((f"{name} (95 %)", "kept") for name in names)), body)
    intro = (
        "It was trained for 10 % of the entries on texts of the same families, dense and sparse ones, from random "
        "streams that no task reads ([card](../../../src/millpond/models/heads/pond-recall-gate.md)). "
        "The context is compressed before any question is seen, and no budget is given. "
        f"By task {least:.1%} to {most:.1%} of the entries are kept; with a lower threshold, which moves all "
        f"decisions at once, {less:.1%} to {more:.1%}. "
        "Single texts differ more, as the card says."
    )
    return (
        f"## With the gate of pond-recall\n\n{intro}\n\n"
        f"{table}\n{trained_note(rows)} {note['hardware']}, {note['software']}.\n\n"
        "From `benchmarks/quality/gate.sh` ([results](../../../benchmarks/results/gate/summary.md)).\n"
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


def in_bytes(entry: Entry[Any]) -> str:
    """How a method keeps a budget in bytes while it decodes; empty for one without a budget."""
    policy = entry()
    if not policy.takes_budget:
        return ""
    if policy.keeps_all:
        return "## A budget in bytes\n\nRefused: everything is stored. `memory_limit` bounds the bytes.\n\n"
    text, who = "After the prompt the pages of the whole cache never take more.", "When they are full,"
    if not policy.grows_when_decoded and "grow" in getattr(entry.options.get("decode"), "type_name", ""):
        policy, who = entry(decode="grow"), 'When they are full with decode="grow" or "once",'
    if policy.grows_when_decoded:
        text += f" {who} {room(replace(policy, bounded=True))}"
    return f"## A budget in bytes\n\n{text}\n\n"


def room(policy: Policy) -> str:
    """How a policy that grows while decoding evicts at a full budget in bytes."""
    evict = policy.decode_rule(0).evict
    if not evict.by_score:
        return 'each step evicts as decode="evict" does.'
    if evict is Evict.HEAVIEST:
        return "each step evicts the entry of a KV head with the most attention at the end of the last prompt."
    if policy.scores_entries:
        return "each step evicts the entry of a KV head with the lowest score before the newest half."
    attention = "had the least attention at the end of the last prompt"
    order = attention if policy.gathers else "the last plan ranked lowest"
    return (
        f"each step evicts one entry of a KV head: of those before the newest half, the one that {order}. Entries that "
        "were decoded since have no score and are evicted first, oldest first."
    )


def options(entry: Entry[Any]) -> str:
    """The options of a method, and how one of them is given."""
    if not entry.options:
        return "None.\n"
    example = next(iter(entry.options.values()))
    return (
        option_table(entry)
        + f'\nIn Python `mp.compress(model, "{entry.name}", budget="20%", {example.name}={example.default!r})`, '
        + f"on the command line `millpond generate --method {entry.name} -o {example.name}={example.default}`.\n"
    )


def paper(entry: Entry[Any]) -> str:
    """A link to the paper; its name alone where it does not lie on arXiv."""
    number = entry.paper.removeprefix("arXiv:")
    return entry.paper if number == entry.paper else f"[{entry.paper}](https://arxiv.org/abs/{number})"


def cell(text: str) -> str:
    """Text that may stand in a Markdown table."""
    return text.replace("|", "\\|")


def left(table: str) -> str:
    """A table whose columns all stand to the left."""
    return table.replace("---:", "---")


def cli_page() -> str:
    """Every command with its options."""
    parts = [f"{NOTE}# Command line\n\n`python -m millpond` is the same as `millpond`.\n"]
    for name, command in commands("millpond", typer.main.get_command(app)):
        parts.append(f"## `{name}`\n\n{first_paragraph(command.help or '')}\n")
        rows = [
            option_row(p) for p in command.params if p.name not in ("help", "install_completion", "show_completion")
        ]
        if rows:
            parts.append(left(markdown_table(("option", "default", "what it does"), rows)))
    return "\n".join(parts)


def commands(name: str, command: Any) -> list[tuple[str, Any]]:
    """The command and those below it, in the order of the help."""
    below = getattr(command, "commands", {})
    return [(name, command)] + [found for child in below for found in commands(f"{name} {child}", below[child])]


def option_row(param: Any) -> tuple[str, str, str]:
    """One option or argument of a command."""
    names = (
        ", ".join(f"`{opt}`" for opt in (*param.opts, *param.secondary_opts))
        if param.opts[0][0] == "-"
        else f"`{param.name.upper()}`"
    )
    default = param.default if not callable(param.default) else None
    shown = "" if default is None or default is False or param.name == "version" else f"`{default}`"
    return names, shown, cell(getattr(param, "help", "") or "")


def first_paragraph(text: str) -> str:
    """Up to the first empty line."""
    return " ".join(text.split("\n\n")[0].split())


def result_table() -> str:
    """The committed measurement of generate() at the longest prompt of one sequence."""
    data, prompt, rows = measured()
    origin = f"{data['hardware']}; {data['software']}; `{data['command']}`."
    where = f"One sequence, prompt {prompt:,} ([all cells](../../{RESULTS.with_suffix('.md').relative_to(ROOT)}))."
    return f"{origin}\n{where}\n\n{generate_table(rows, data['anchor'])}"


def measured() -> tuple[dict[str, Any], int, list[dict[str, Any]]]:
    """The committed measurement of generate(), its longest prompt of one sequence, and the rows of that."""
    data = json.loads(RESULTS.read_text(encoding="utf-8"))
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


def main() -> None:
    """Write, or with --check compare."""
    stale = [path for path, text in pages().items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    drawn = {path: shown for path, shown in pictures().items() if not is_current(path, digest(shown))}
    stale += drawn
    names = ", ".join(str(path.relative_to(ROOT)) for path in stale)
    if "--check" in sys.argv[1:]:
        sys.exit(f"stale: {names}; run make docs-pages" if stale else 0)
    for path, text in pages().items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    for path, shown in drawn.items():
        write(curve_picture(shown), path, about=digest(shown))
    print(f"written: {names}" if stale else "all pages were current")


if __name__ == "__main__":
    main()
