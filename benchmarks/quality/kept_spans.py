"""Facts in a kept "system prompt" of pond-recall, and the same prompts without keep.

Usage: python benchmarks/quality/kept_spans.py [--samples 40] [--length 1000] [--facts 8] [--budget 10%] [--threads 1]
    [--seed 0] [--out benchmarks/results/kept-spans]

A text begins with `facts` facts among words that say nothing, and goes on without facts. When it was compressed, a
question about one of the facts comes as a later turn. Each method reads every text twice: as it is, and with the
beginning kept. An answer is right if the token behind the name is the right one; greedy, float32.
"""

from __future__ import annotations

import argparse
import time
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

import millpond as mp
from millpond_lab.bench.common.machine import describe_machine
from millpond_lab.bench.common.report import markdown_table, write_report
from millpond_lab.pond import words as w
from millpond_lab.pond.facts import filler

#: Name in the table, method and options.
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "window": ("window", {}),
    "streaming": ("streaming", {"positions": "absolute"}),
    "h2o": ("h2o", {}),
    "tova": ("tova", {}),
    "keydiff": ("keydiff", {}),
}
#: Words that say nothing before each fact, and tokens of a question and the name that its answer begins with.
GAP, QUESTION = 4, 4


def sample(seed: int, index: int, length: int, n_facts: int) -> tuple[list[int], int, int]:
    """Ids of a prompt, how many of them are its beginning with the facts, and the id of the answer."""
    rng = np.random.default_rng((seed, index))
    names = rng.choice(np.array(w.ids(w.NAMES)), n_facts, replace=False)
    things = rng.choice(np.array(w.ids(w.THINGS)), n_facts, replace=False)
    ids = [w.ID[w.BOS]]
    for name, thing in zip(names.tolist(), things.tolist(), strict=True):
        ids += [*filler(rng, GAP, "uniform").tolist(), name, thing]
    begins, asked = len(ids), int(rng.integers(n_facts))
    question = [w.ID[w.ASK], int(names[asked]), w.ID[w.IS], int(names[asked])]
    rest = filler(rng, length - begins - len(question), "uniform").tolist()
    return [*ids, *rest, *question], begins, int(things[asked])


@torch.no_grad()
def share_right(model: Any, name: str, budget: str, rows: list[tuple[list[int], int, int]], keep: bool) -> float:
    """The share of texts whose question is answered."""
    method, options = METHODS[name]
    found = []
    with mp.compress(model, method, budget, **options) as cache:
        for ids, begins, answer in rows:
            cache.reset()
            if keep:
                cache.protect([(0, begins)])
            tokens = torch.tensor([ids])
            model(tokens[:, :-QUESTION], cache=cache, logits_to_keep=1)
            found.append(int(model(tokens[:, -QUESTION:], cache=cache).logits[0, -1].argmax()) == answer)
    return float(np.mean(found))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=40)
    parser.add_argument("--length", type=int, default=1000)
    parser.add_argument("--facts", type=int, default=8)
    parser.add_argument("--budget", default="10%")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/kept-spans"))
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    warnings.simplefilter("ignore", category=UserWarning)
    rows = [sample(args.seed, index, args.length, args.facts) for index in range(args.samples)]
    model, began = mp.load_model("pond-recall", "f32"), time.perf_counter()
    found = {}
    for name in METHODS:
        found[name] = {kind: share_right(model, name, args.budget, rows, kind == "kept") for kind in ("plain", "kept")}
        print(name, found[name], f"{time.perf_counter() - began:.0f} s", flush=True)
    table = markdown_table(
        ["method", "as it is", "beginning kept"],
        [[name, f"{of['plain']:.3f}", f"{of['kept']:.3f}"] for name, of in found.items()],
    )
    kept = float(np.mean([begins for _, begins, _ in rows]))
    about = {
        "samples": args.samples,
        "length": args.length,
        "facts": args.facts,
        "budget": args.budget,
        "kept_tokens": kept,
        "seed": args.seed,
        "machine": asdict(describe_machine()),
        "right": found,
    }
    text = (
        f"# Facts in a kept beginning, pond-recall\n\n{args.samples} texts of {args.length} tokens, budget "
        f"{args.budget}; {kept:.0f} tokens at the beginning hold {args.facts} facts. Right answers to a "
        f"later turn:\n\n{table}\n"
    )
    write_report(args.out.parent, args.out.name, about, text)
    print(text)


if __name__ == "__main__":
    main()
