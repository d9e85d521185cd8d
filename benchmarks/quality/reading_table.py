"""What methods hold while they read a long text, how long they read, and what they find in it afterwards: one table.

    reading_table.py smollm2-135m full/int4 locret:heads=HEADS:prefill=chunks@5% --essay emma.txt --out RESULTS.json

Locret (arXiv:2410.01805) has itself beside InfLLM, SirLLM, MInference and quantization. Each setting (METHOD, or
METHOD:OPTION=VALUE@BUDGET/FORMAT) reads the same texts in one pass each, without knowing what will be asked; questions
about facts are then answered from copies of what it holds. `peak` is the most that the pools of the cache took, and
what lies outside of them, over the bytes of a full cache in the model's dtype; `held` is what was in use afterwards.
Seconds are those of the processor, for reading alone. Settings take turns on each text, in an order that is drawn. A
run goes on from the rows that the file of --out has. Files of a setting are named without a folder.
"""

from __future__ import annotations

import argparse
import json
import random
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from setting_texts import parse, write
from torch import Tensor

import millpond as mp
from millpond.models.cache_argument import cache_argument
from millpond_lab.bench.common.machine import describe_machine
from millpond_lab.evals.decoding.batch import EncodedQuestion, encode
from millpond_lab.evals.tasks.facts import prose_facts

SEED, FACTS = 7, 3
#: Tokens of an answer at most.
ANSWER = 24


@torch.inference_mode()
def answer(model: Any, tokenizer: Any, cache: Any, asked: EncodedQuestion) -> str:
    """The greedy answer to a question, from a copy of the cache."""
    ids, written = torch.tensor([asked.tokens]), list[int]()
    with cache.fork() as copy:
        while len(written) < ANSWER and not any(end in tokenizer.decode(written) for end in asked.question.stop):
            ids = model(ids, **cache_argument(copy), logits_to_keep=1).logits[:, -1:].argmax(-1)
            written.append(int(ids))
    return str(tokenizer.decode(written))


@torch.inference_mode()
def judged(model: Any, tokenizer: Any, opening: Tensor, asked: Any, setting: str) -> dict[str, float]:
    """One setting on one text (1, L)."""
    with mp.compress(model, tokenizer=tokenizer, **parse(setting, {}, opening.shape[1])) as cache:
        began = time.process_time()
        model(opening, **cache_argument(cache), logits_to_keep=1)
        for layer_cache in cache.layer_caches:
            layer_cache.run_plans()
        seconds, stats = time.process_time() - began, cache.stats()
        answers = [answer(model, tokenizer, cache, one) for one in asked]
        return {
            "found": sum(one.question.references[0] in said for one, said in zip(asked, answers, strict=True)),
            "peak": round((stats.reserved_bytes + stats.outside_bytes) / stats.full_kv_bytes, 4),
            "held": round((stats.kv_bytes + stats.outside_bytes) / stats.full_kv_bytes, 4),
            "cpu_s": round(seconds, 2),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("settings", nargs="+", metavar="SETTING")
    parser.add_argument("--essay", type=Path, required=True, help="a text whose sentences stand around the facts")
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--contexts", type=int, default=10)
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True, help="JSON file that rows are added to")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    warnings.simplefilter("ignore", category=UserWarning)
    model, tokenizer = mp.load_model(args.model, args.dtype), mp.load_tokenizer(args.model)
    task = prose_facts(length=args.length, facts=FACTS, questions=FACTS, essay=str(args.essay))
    load = {name: getattr(args, name) for name in ("model", "length", "dtype", "threads")} | {"facts": FACTS}
    report = json.loads(args.out.read_text(encoding="utf-8")) if args.out.exists() else {"load": load, "settings": {}}
    if report["load"] != load:
        raise SystemExit(f"{args.out} has texts of another kind: name another file")
    report["hardware"] = describe_machine().hardware
    rows, turns = report["settings"], random.Random(SEED)
    for number, sample in enumerate(task.samples(tokenizer, args.contexts, SEED)):
        (prompt,) = encode(sample, tokenizer, "generate", "agnostic")
        for setting in turns.sample(args.settings, len(args.settings)):
            row = rows.setdefault(setting, {"found": [], "peak": [], "held": [], "cpu_s": []})
            if len(row["found"]) > number:
                continue
            for name, value in judged(model, tokenizer, torch.tensor([prompt.opening]), prompt.asked, setting).items():
                row[name].append(value)
            write(args.out, report)
            print(f"{number + 1} of {args.contexts}: {setting} {[row[name][-1] for name in row]}", flush=True)


if __name__ == "__main__":
    main()
