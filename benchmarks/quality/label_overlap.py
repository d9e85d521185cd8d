"""How far the best tenth of a text's entries can be known before its questions are: the overlap of their own labels.

Labels of held-out rows of pond-recall's families are made by all questions of a row, by the same ones in reverse order,
and by each half of them; the overlaps of their best tenths say how much the best tenth depends on which questions come,
and on nothing but their order. The heads of the package are compared with all questions, as in their card, and with one
half. Writes FILE, and a table next to it.

  benchmarks/quality/label_overlap.py --out benchmarks/results/label-overlap.json [--texts 64]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from millpond.hf.retaining_heads import heads_of_package
from millpond.models.load import load_model
from millpond_lab.bench.common.machine import describe_machine
from millpond_lab.evals.report.leaderboard import markdown_table
from millpond_lab.pond.words import EOS_ID
from millpond_lab.train.retain.features import TextReader
from millpond_lab.train.retain.texts import RecallTexts
from millpond_lab.train.retain.train import overlap

MODEL, STREAM, SEED = "pond-recall", "retain-check", 0
SHARE = 0.1
#: What is compared, by the name of the result.
COLUMNS = {
    "order_all": "all questions, and in reverse order",
    "order": "half of them, and in reverse order",
    "other": "half of them, and the other half",
    "heads_all": "the heads, and all questions",
    "heads": "the heads, and half of them",
}


def questions_of(asked: Tensor) -> list[Tensor]:
    """The questions with their answers, in the order of the row."""
    ends = [int(end) + 1 for end in (asked == EOS_ID).nonzero().flatten()]
    return [asked[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]


def labels(reader: TextReader, text: Tensor, questions: list[Tensor]) -> list[Tensor]:
    """(KV heads, n) of each layer: the labels of a text by its questions."""
    return [layer.labels for layer in reader.read(torch.cat([text, *questions]), len(text))]


def measured(n_texts: int) -> dict[str, list[list[float]]]:
    """Each of `COLUMNS` by layer and KV head, a mean over the texts that have at least four questions."""
    model = load_model(MODEL)
    reader, heads, texts = TextReader(model), heads_of_package(model), RecallTexts()
    found: dict[str, list[Tensor]] = {name: [] for name in COLUMNS}
    for step in range(n_texts):
        row = texts.draw(STREAM, SEED, step)
        text, questions = row.ids[: row.begin], questions_of(row.ids[row.begin :])
        if len(questions) < 4:
            continue
        first, second = questions[::2], questions[1::2]
        layers = reader.read(row.ids, row.begin)
        orders = first, second, first[::-1], questions[::-1]
        a, b, again, reverse = (labels(reader, text, chosen) for chosen in orders)
        scores = [heads.at(i, x.features, len(x.labels)).raw(x.features).T.float() for i, x in enumerate(layers)]
        every = [layer.labels for layer in layers]
        pairs = {
            "order_all": (reverse, every),
            "order": (again, a),
            "other": (b, a),
            "heads_all": (scores, every),
            "heads": (scores, a),
        }
        for name, compared in pairs.items():
            found[name].append(torch.stack([overlap(x, y, SHARE) for x, y in zip(*compared, strict=True)]))
    return {name: torch.stack(each).mean(0).tolist() for name, each in found.items()}


def table(result: dict[str, Any]) -> str:
    """One row per layer and KV head, and the means."""
    values = {name: torch.tensor(result["overlaps"][name]) for name in COLUMNS}
    n_layers, n_heads = values["other"].shape
    body = [
        (f"{layer}, {head}", *(f"{float(values[name][layer, head]):.2f}" for name in COLUMNS))
        for layer in range(n_layers)
        for head in range(n_heads)
    ]
    body.append(("all", *(f"{float(values[name].mean()):.2f}" for name in COLUMNS)))
    return markdown_table(("layer, KV head", *COLUMNS.values()), body)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--texts", type=int, default=64)
    args = parser.parse_args()
    torch.set_num_threads(1)
    with torch.no_grad():
        overlaps = measured(args.texts)
    machine = describe_machine()
    result = {
        "model": MODEL,
        "stream": STREAM,
        "seed": SEED,
        "texts": args.texts,
        "share": SHARE,
        "overlaps": overlaps,
        "hardware": machine.hardware,
        "software": machine.software,
    }
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    text = table(result)
    args.out.with_suffix(".md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
