"""Facts in short messages of a long text on a real model, with and without fair shares.

Usage: python benchmarks/quality/fair_shares.py TEXT [--model smollm2-135m] [--samples 4] [--facts 6] [--filler 70]
    [--budgets 10% 20%] [--methods h2o tova] [--shares 0.5 1] [--threads 1] [--seed 0]
    [--out benchmarks/results/fair-shares]

TEXT is a plain text, out of which each sample draws other messages. A text is messages in turn: one that says the code
of something, and one of `filler` tokens of TEXT. When it was compressed, a later turn asks for each code, on a
fork of the cache. An answer is right if greedy choice would write every token of the code; float32.
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

THINGS = ("bicycle", "garden gate", "blue box", "office", "boat", "cellar", "piano", "attic", "old safe", "kitchen")
#: A text: ids, the spans of its messages, and of each fact the question's ids and the answer's.
Sample = tuple[list[int], list[tuple[int, int]], list[tuple[list[int], list[int]]]]


def sample(tokenizer: Any, filler: list[int], seed: int, index: int, n_facts: int, length: int) -> Sample:
    """The text number `index`."""
    rng = np.random.default_rng((seed, index))
    ids: list[int] = []
    spans, asked = [], []
    for thing in rng.choice(np.array(THINGS), n_facts, replace=False).tolist():
        code, first = str(rng.integers(100, 1000)), int(rng.integers(len(filler) - length))
        for message in (_ids(tokenizer, f"\nThe code of the {thing} is {code}.\n"), filler[first : first + length]):
            spans.append((len(ids), len(ids) + len(message)))
            ids += message
        question = f"\nQuestion: What is the code of the {thing}?\nAnswer: The code of the {thing} is"
        asked.append((_ids(tokenizer, question), _ids(tokenizer, f" {code}")))
    return ids, spans, asked


def _ids(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


@torch.no_grad()
def right(model: Any, cache: Any, text: Sample, share: float | None) -> list[bool]:
    """Which codes are written, in the order of the text."""
    ids, spans, asked = text
    cache.reset()
    if share is not None:
        cache.protect(spans, share=share)
    model(torch.tensor([ids]), cache=cache, logits_to_keep=1)
    found = []
    for question, answer in asked:
        fork = cache.fork()
        chosen = model(torch.tensor([[*question, *answer[:-1]]]), cache=fork).logits[0, -len(answer) :].argmax(1)
        found.append(chosen.tolist() == answer)
        fork.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--facts", type=int, default=6)
    parser.add_argument("--filler", type=int, default=70)
    parser.add_argument("--budgets", nargs="+", default=["10%", "20%"])
    parser.add_argument("--methods", nargs="+", default=["h2o", "tova"])
    parser.add_argument("--shares", nargs="+", type=float, default=[0.5, 1.0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/fair-shares"))
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    warnings.simplefilter("ignore", category=UserWarning)
    model, tokenizer = mp.load_model(args.model, "f32"), mp.load_tokenizer(args.model)
    filler = _ids(tokenizer, args.text.read_text(encoding="utf-8")[:400_000])
    texts = [sample(tokenizer, filler, args.seed, n, args.facts, args.filler) for n in range(args.samples)]
    began, cells = time.perf_counter(), [("full", "")]
    cells += [(method, budget) for budget in args.budgets for method in args.methods]
    found: dict[str, dict[str, float]] = {}
    for method, budget in cells:
        shares = [None] if method == "full" else [None, *args.shares]
        with mp.compress(model, method, budget or None) as cache:
            for share in shares:
                own = [one for text in texts for one in right(model, cache, text, share)]
                found.setdefault(f"{method} {budget}".strip(), {})["none" if share is None else f"{share:g}"] = float(
                    np.mean(own)
                )
                print(method, budget, share, f"{np.mean(own):.3f}, {time.perf_counter() - began:.0f} s", flush=True)
    columns = ["none", *(f"{share:g}" for share in args.shares)]
    rows = [[name, *(f"{of[c]:.3f}" if c in of else "" for c in columns)] for name, of in found.items()]
    n_tokens = float(np.mean([len(ids) for ids, _, _ in texts]))
    about = {
        "model": args.model,
        "text": args.text.name,
        "samples": args.samples,
        "facts": args.facts,
        "filler": args.filler,
        "tokens": n_tokens,
        "seed": args.seed,
        "threads": args.threads,
        "machine": asdict(describe_machine()),
        "right": found,
    }
    words = (
        f"# Facts in short messages, {args.model}\n\n{args.samples} texts of {n_tokens:.0f} tokens, each with "
        f"{args.facts} codes between messages of {args.filler} tokens of {args.text.name}. Right answers to "
        f"{args.samples * args.facts} questions as later turns, by the share that each message keeps:\n\n"
        f"{markdown_table(['method, budget', *columns], rows)}\n"
    )
    write_report(args.out.parent, args.out.name, about, words)
    print(words)


if __name__ == "__main__":
    main()
