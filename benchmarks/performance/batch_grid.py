"""Planned batches over the degree of sharing, the memory for caches and the length of answers; parts left out in turn.

    python benchmarks/performance/batch_grid.py --threads 1 --json benchmarks/results/batch-grid.json

A cell has `--prompts` prompts of `--shared` + `--own` tokens, of which as many as its degree begin alike; a pool of a
share of what all of them and their answers would take, beginnings held once; and answers of one length or of three
("unequal": of a group's prompts 8, 32 or 128). It runs in the order of arrival and sorted, both with a prefix cache,
and as a planned batch; in the smallest pool also planned with one part of BatchLLM (arXiv:2412.03594) left out: the
groups, the order by expected answers, batching by memory, the one call for own and shared entries. All run in turns, in
random order. A row has the tokens of prompts that were computed, which have no noise, and the CPU seconds of each
repetition. A run goes on from the rows that the file of --json has.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import product
from typing import Any
from unittest import mock

from script import GrowingRows, begin

from millpond.engine import components, shared_prefixes
from millpond.engine.batch_plan import plan_batch
from millpond.kernels import ops
from millpond.kernels.args import AttendArgs, AttendOutput, SharedDecodeArgs
from millpond_lab.bench.batch import ORDERS, TreeLevel, once, tree_prompts
from millpond_lab.bench.generate.candidates import ModelShape

#: Small, so that a grid takes minutes; as many KV heads as query heads.
SHAPE = ModelShape(layers=2, width=256, heads=4, kv_heads=4, head_dim=64, ffn=704, vocab=2048)
DEGREES, POOLS, ANSWERS = (1, 4, 16), (0.25, 0.5, 1.0), (8, 32, 128)
#: Entries of a page, and the bytes of pages over those of their keys and values.
SLOTS, PAGES = 16, 1.05


def two_calls(args: SharedDecodeArgs) -> AttendOutput:
    """Own entries and shared ones in calls of their own."""
    out, lse, _ = ops.decode(args.step)
    found = AttendOutput(out.contiguous(), lse.contiguous())
    for run in args.shared:
        scale = args.step.regions.shape.scale
        found = ops.attend(AttendArgs(args.q, run.regions, scale, members=run.members, partial=tuple(found)))
    return found


def without(part: str) -> AbstractContextManager[Any]:
    """The engine without a part of the plan."""
    parts: dict[str, Callable[[], AbstractContextManager[Any]]] = {
        "groups": lambda: mock.patch.object(shared_prefixes, "plan_batch", _no_groups),
        "order": lambda: mock.patch.object(shared_prefixes, "plan_batch", _no_order),
        "memory": lambda: mock.patch.object(components, "_batch_row_bytes", return_value=0),
        "one call": lambda: mock.patch.object(ops, "decode_shared", two_calls),
    }
    return parts[part]() if part else nullcontext()


def _no_groups(prompts: Any, answers: Any, *, levels: int | None) -> Any:
    return plan_batch(prompts, answers, levels=0)


def _no_order(prompts: Any, answers: Any, *, levels: int | None) -> Any:
    return plan_batch(prompts, None, levels=levels)


#: Name of a run -> its order, and what is left out.
RUNS = {order: (order, "") for order in ORDERS} | {
    f"no {part}": ("batch", part) for part in ("groups", "order", "memory", "one call")
}


def new_tokens_of(prompts: list[tuple[int, ...]], shared: int, answers: int | str, seed: int) -> dict[Any, int]:
    """Tokens of the answer to each prompt; unequal ones are those of a group."""
    if isinstance(answers, int):
        return dict.fromkeys(prompts, answers)
    groups = sorted({prompt[:shared] for prompt in prompts})
    random.Random(seed).shuffle(groups)
    of_group = {group: ANSWERS[number % len(ANSWERS)] for number, group in enumerate(groups)}
    return {prompt: of_group[prompt[:shared]] for prompt in prompts}


def pool_bytes(shape: ModelShape, args: argparse.Namespace, degree: int, new_tokens: list[int]) -> float:
    """Bytes of all prompts and answers in whole pages, with beginnings held once."""
    own = sum(-(-(args.own + count) // SLOTS) for count in new_tokens)
    pages = own + args.prompts // degree * -(-args.shared // SLOTS)
    return PAGES * pages * SLOTS * 2 * 2 * shape.layers * shape.kv_heads * shape.head_dim


def measure(
    model: Any, shape: ModelShape, args: argparse.Namespace, cell: tuple[int, float, int | str]
) -> dict[str, Any]:
    """The row of a cell."""
    degree, pool, answers = cell
    tree = [TreeLevel(args.prompts // degree, args.shared), TreeLevel(degree, args.own)]
    prompts = tree_prompts(tree, shape.vocab, args.seed)
    lengths = new_tokens_of(prompts, args.shared, answers, args.seed)
    limit = round(pool * pool_bytes(shape, args, degree, list(lengths.values())))
    runs = list(RUNS) if degree > 1 and pool == min(POOLS) else list(ORDERS)
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    read: dict[str, int] = {}
    tokens: dict[str, Any] = {}
    turns = random.Random(args.seed)
    for _ in range(args.repeats):
        for name in turns.sample(runs, len(runs)):
            order, part = RUNS[name]
            asked = sorted(prompts) if order == "sorted" else prompts
            with without(part):
                counts = [lengths[one] for one in asked]
                run = once(model, asked, counts, order, method="full", kv_memory=limit, page_slots=SLOTS)
            seconds[name].append(run.cpu_seconds)
            read[name], tokens[name] = run.read, run.answers
    alike = sum(one == tokens["arrival"] for one in tokens.values())
    return {"degree": degree, "pool": pool, "answers": answers, "read": read, "cpu_s": seconds, "alike": alike}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for name, value in (("prompts", 48), ("shared", 192), ("own", 32), ("repeats", 3), ("seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--degrees", type=int, nargs="+", default=list(DEGREES))
    parser.add_argument("--pools", type=float, nargs="+", default=list(POOLS))
    args, shape = begin(parser)
    shape = shape if args.tiny else SHAPE
    model = shape.build(args.seed)
    names = ("prompts", "shared", "own", "repeats", "seed", "threads", "tiny")
    rows = GrowingRows(args.json, {name: getattr(args, name) for name in names}, "degree", "pool", "answers")
    run = partial(measure, model, shape, args)
    for answers, pool, degree in product((*ANSWERS[:2], "unequal", ANSWERS[2]), args.pools, args.degrees):
        if not rows.has(degree, pool, answers):
            rows.add(run((degree, pool, answers)))


if __name__ == "__main__":
    main()
