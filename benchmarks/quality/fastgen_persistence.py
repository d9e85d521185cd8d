"""Whether a head keeps the rule that FastGen gives it at a prompt's end: the rule after 64 and after 256 more tokens.

    fastgen_persistence.py --model smollm2-135m --windows 4 --out RESULTS.json TEXT...

Of each window and KV head: the rule of a prompt of `PROMPT` tokens; that of the same text with so many tokens more; and
that of the newer tokens' queries alone, over all entries. Counted are pairs of rules, at the prompt's end and later, in
the order special, punctuation, frequent, local, full. Windows are read by themselves, in float32, with the full cache.
Rules are chosen from all queries, as in the paper, not from 128 of them, the method's default.
"""

from __future__ import annotations

import argparse
import itertools
import json
from functools import partial
from pathlib import Path
from typing import Any

import torch
from attention_mass import by_layer, eager_model
from setting_texts import write
from torch import Tensor

from millpond.hf.tokenizer_source import TokenizerSource
from millpond.kernels.decode_rules import UNBOUNDED
from millpond.methods import METHODS
from millpond.models.load import load_tokenizer
from millpond.policy.head_rules import HeadRulesPolicy, NestedPlan
from millpond.policy.needs import HeadRule
from millpond.policy.view import View
from millpond_lab.bench.common.machine import describe_machine
from millpond_lab.train.text.data import read_document
from millpond_lab.train.text.eval import spread_windows

PROMPT, MORE = 768, (64, 256)
#: What is compared with the rules at the prompt's end: tokens more, and the first query that counts.
LATER = {f"{whose} {more}": (more, PROMPT * (whose == "new")) for whose in ("all", "new") for more in MORE}


def plan(weights: Tensor, ids: Tensor, group: int, policy: HeadRulesPolicy, since: int = 0) -> NestedPlan:
    """FastGen's plan for the weights (H, L, L) of one layer over the words (L,) of a text.

    Args:
        group: query heads of a KV head. since: recovery is that of the queries from here on.
    """
    length = weights.shape[-1]
    distance = torch.arange(length)[since:, None] - torch.arange(length)

    def received(begin: int, end: int) -> Tensor:
        out = (distance < begin) | (distance >= (end or length))
        return weights[:, since:].masked_fill(out, 0).sum(1).unflatten(0, (-1, group))

    signal = weights.sum(1).unflatten(0, (-1, group)).mean(1)
    positions = torch.arange(length, dtype=torch.int32).expand(signal.shape)
    words = ids.expand(signal.shape)
    view = View(positions, signal, length, 0, tokens=lambda: words, head_attention=received)
    return policy.plan(view, UNBOUNDED)


def pairs(weights: Tensor, ids: Tensor, group: int, policy: HeadRulesPolicy, prompt: int = PROMPT) -> list[list[int]]:
    """Of each of `LATER` how many KV heads of a layer have each pair of rules, a list of 25."""
    first = plan(weights[:, :prompt, :prompt], ids[:prompt], group, policy).kinds
    counts = []
    for more, since in LATER.values():
        end = prompt + more
        later = plan(weights[:, :end, :end], ids[:end], group, policy, min(since, prompt)).kinds
        counts.append((first * len(HeadRule) + later).bincount(minlength=len(HeadRule) ** 2).tolist())
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("texts", nargs="+", type=Path)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--name", help="of the model in the results; its own by default")
    parser.add_argument("--windows", type=int, default=4, help="per text, spread evenly over it")
    parser.add_argument("--threshold", type=float, default=0.95)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True, help="JSON file that rows are added to")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model, tokenizer = eager_model(args.model), load_tokenizer(args.model)
    group = model.config.num_attention_heads // model.config.num_key_value_heads
    built = METHODS.get("fastgen")(threshold=args.threshold)
    assert isinstance(built, HeadRulesPolicy)
    look = partial(pairs, group=group, policy=built.with_tokens(TokenizerSource(tokenizer)))
    report: dict[str, Any] = json.loads(args.out.read_text(encoding="utf-8")) if args.out.exists() else {"rows": []}
    cut = {}
    for text in args.texts:
        ids = tokenizer(read_document(text), add_special_tokens=False, verbose=False).input_ids
        cut[text.name] = spread_windows(ids, None, PROMPT + max(MORE), args.windows)
    for place, text in itertools.product(range(args.windows), cut):
        key = {"model": args.name or args.model, "text": text, "threshold": args.threshold, "windows": args.windows}
        row = next((one for one in report["rows"] if {name: one[name] for name in key} == key), None)
        if row is None:
            row = key | {"hardware": describe_machine().hardware, "pairs": {name: [] for name in LATER}}
            report["rows"].append(row)
        if len(row["pairs"]["all 64"]) > place:
            continue
        window = cut[text][place]
        with torch.inference_mode():
            counts = torch.tensor(by_layer(model, window, partial(look, ids=window[0]))).sum(0)
        for name, one in zip(LATER, counts.tolist(), strict=True):
            row["pairs"][name].append(one)
        write(args.out, report)
        print(f"{text} {place + 1} of {args.windows}", flush=True)


if __name__ == "__main__":
    main()
