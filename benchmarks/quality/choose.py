"""What to use at a share of the full cache's bytes: chosen on one half of the texts, judged on the other.

    choose.py --texts RESULTS.json ... --recall FOLDER ... --preset RESULTS.json --out benchmarks/results/choice.json

RESULTS are what `real_text.py` wrote; the folders hold answers that `real.sh recall` made. The choice is by a rule: the
least mean loss on the choosing half among the settings that hold at most the share. Texts are chosen on WikiText-2's
validation text and judged on the others; answers are chosen on the first half of the contexts and judged on the rest.

The presets `light` and `balanced` are chosen likewise from what `real.sh presets` made, with --presets. What is not
given stays as it is in the file.

The preset of the smallest cache is chosen among the methods that keep 512 of 1,024 tokens in 4 bits, from the results
of `budget_bytes.sh choice short`: the least perplexity among those that keep nine tenths of the answers to known
questions.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from real_recall import compared, read

from millpond_lab.bench.common.report import markdown_table

#: Most bytes of the full cache's, when the first token is predicted.
SHARES = (0.34, 0.23, 0.135)
#: Of `light` and `balanced`.
PRESET_SHARES = (0.6, 0.34)
#: The text on which is chosen; all others judge.
CHOOSING = "wikitext2_valid"
#: Entries of 1,024 tokens and their format in the preset of the smallest cache, and the least share of full's answers.
PRESET, LEAST_ANSWERS = ("512", "rotated4"), 0.9
#: What reads ahead or is a bound has no place among what a user can set.
NOT_FOR_USE = {"oracle"}


def setting(row: dict[str, Any]) -> tuple[str, str, str]:
    """Method, budget and number format of a row."""
    return row["method"], row["budget"] or "all", "bf16" if row["codec"] == "auto" else row["codec"]


def best(rows: list[dict[str, Any]], most: float, loss: str) -> dict[str, Any] | None:
    """The row of least loss among those that hold at most a share of the bytes."""
    usable = [row for row in rows if row["bytes"] <= most and row["method"] not in NOT_FOR_USE]
    return min(usable, key=lambda row: (row[loss], row["bytes"]), default=None)


def texts(rows: list[dict[str, Any]], shares: tuple[float, ...] = SHARES) -> list[dict[str, Any]]:
    """One record per share and judging text: what was chosen, and its loss there."""
    found = []
    for most in shares:
        chosen = best(
            [row for row in rows if CHOOSING in row["task"] and "context_len=1024" in row["task"]], most, "more"
        )
        if chosen is None:
            continue
        judged = [row for row in rows if setting(row) == setting(chosen) and CHOOSING not in row["task"]]
        for row in judged:
            keys = ("task", "windows", "bytes", "more", "low", "high")
            found.append(
                {
                    "share": f"{most:.1%}",
                    "setting": setting(chosen),
                    "chosen_with": chosen["more"],
                    **{key: row[key] for key in keys},
                }
            )
    return found


def answers(folders: list[Path]) -> list[dict[str, Any]]:
    """One record per protocol and share: what was chosen on the first half of the contexts, its score on the second."""
    found = []
    for folder in folders:
        cells, questions = read(folder)
        count = len({sample for sample, _ in next(iter(cells.values()))})
        first, second = (compared(cells, questions, span) for span in ((0, count // 2), (count // 2, count)))
        for row in first:
            row["lost"] = 1 - row["score"]["mean"]
        for most in SHARES:
            chosen = best([row for row in first if row["method"] != "full"], most, "lost")
            judged = [row for row in second if chosen is not None and setting(row) == setting(chosen)]
            for row in judged:
                keys = ("task", "protocol", "questions", "contexts", "bytes", "of_full", "score", "difference")
                record = {"share": f"{most:.1%}", "setting": setting(row), "chosen_with": chosen["of_full"]}
                found.append(record | {key: row[key] for key in keys})
    return found


def smallest(rows: list[dict[str, Any]], folders: list[Path]) -> list[dict[str, Any]]:
    """A record per method of which the preset is one, that which is chosen first."""
    asked: list[tuple[dict[str, Any], dict[str, Any]]] = []
    for folder in folders:
        cells, questions = read(folder)
        count = len({sample for sample, _ in next(iter(cells.values()))})
        halves = [compared(cells, questions, span) for span in ((0, count // 2), (count // 2, count))]
        asked += [pair for pair in zip(*(sorted(half, key=setting) for half in halves), strict=True)]
    known = {setting(first): (first, second) for first, second in asked if first["protocol"] == "aware"}
    found = []
    for row in rows:
        if CHOOSING in row["task"] and setting(row)[1:] == PRESET and setting(row) in known:
            first, second = known[setting(row)]
            judged = next((r for r in rows if setting(r) == setting(row) and CHOOSING not in r["task"]), None)
            if judged is not None:
                found.append(
                    {
                        "setting": setting(row),
                        "bytes": row["bytes"],
                        "more": row["more"],
                        "answers": first["of_full"],
                        "judged": {key: judged[key] for key in ("task", "windows", "bytes", "more", "low", "high")},
                        "judged_answers": {key: second[key] for key in ("of_full", "questions", "contexts", "score")},
                    }
                )
    return sorted(found, key=lambda record: (record["answers"] < LEAST_ANSWERS, record["more"]))


def page(data: dict[str, Any]) -> str:
    """All tables."""

    def named(record: dict[str, Any]) -> str:
        method, budget, codec = record["setting"]
        return f"`{method}` {budget}, {codec}"

    def losses(records: list[dict[str, Any]]) -> list[tuple[str, ...]]:
        return [
            (
                r["share"],
                named(r),
                f"{r['chosen_with']:+.1%}",
                r["task"].split(":")[1].removeprefix("path="),
                r["task"].split("context_len=")[1].split(":")[0],
                str(r["windows"]),
                f"{r['bytes']:.1%}",
                f"{r['more']:+.1%}",
                f"{r['low']:+.1%} to {r['high']:+.1%}",
            )
            for r in records
        ]

    kept = [
        (
            r["share"],
            "known" if r["protocol"] == "aware" else "unknown",
            named(r),
            f"{r['chosen_with']:.2f}",
            f"{r['questions']} on {r['contexts']}",
            f"{r['bytes']:.1%}",
            f"{r['of_full']:.2f}",
            f"{r['score']['low']:.2f} to {r['score']['high']:.2f}",
        )
        for r in data["answers"]
    ]
    head = ("at most", "chosen", "lost where chosen", "judged on", "context", "windows", "bytes", "lost", "95 %")
    recall = (
        "at most",
        "question",
        "chosen",
        "of full where chosen",
        "questions on contexts",
        "bytes",
        "of full",
        "score, 95 %",
    )
    small = [
        (
            named(r),
            f"{r['bytes']:.1%}",
            f"{r['more']:+.1%}",
            f"{r['answers']:.2f}",
            f"{r['judged']['more']:+.1%}",
            f"{r['judged']['low']:+.1%} to {r['judged']['high']:+.1%}",
            f"{r['judged_answers']['of_full']:.2f}",
            f"{r['judged_answers']['score']['low']:.2f} to {r['judged_answers']['score']['high']:.2f}",
        )
        for r in data["smallest"]
    ]
    first = ("setting", "bytes", "lost where chosen", "answers of full where chosen", "lost", "95 %", "answers of full")
    perplexity, asked = markdown_table(head, losses(data["texts"])), markdown_table(recall, kept)
    named_ones = markdown_table(head, losses(data["presets"]))
    preset = markdown_table((*first, "score, 95 %"), small)
    return (
        f"# What to use\n\n## Perplexity\n\n{perplexity}\n\n## Answers\n\n{asked}\n\n"
        f"## The presets light and balanced\n\n{named_ones}\n\n"
        f"## The preset of the smallest cache\n\nThe first row is chosen.\n\n{preset}\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", nargs="+", type=Path, default=[])
    parser.add_argument("--recall", nargs="+", type=Path, default=[])
    parser.add_argument("--presets", nargs="+", type=Path, default=[])
    parser.add_argument("--preset", nargs="+", type=Path, default=[])
    parser.add_argument("--out", type=Path, required=True, help="as .json; the tables lie next to it, as .md")
    args = parser.parse_args()
    rows, presets, preset = (
        [row for path in paths for row in json.loads(path.read_text(encoding="utf-8"))]
        for paths in (args.texts, args.presets, args.preset)
    )
    data: dict[str, Any] = {"texts": [], "presets": [], "answers": [], "smallest": []}
    if args.out.exists():
        data |= json.loads(args.out.read_text(encoding="utf-8"))
    found = {
        "texts": texts(rows),
        "presets": texts(presets, PRESET_SHARES),
        "answers": answers(args.recall),
        "smallest": smallest(preset, args.recall),
    }
    data |= {name: part for name, part in found.items() if part}
    args.out.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    args.out.with_suffix(".md").write_text(page(data), encoding="utf-8")
    print(page(data))


if __name__ == "__main__":
    main()
