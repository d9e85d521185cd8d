"""Plans of offloading that are run: how far predictions are off, and whether the chosen plan is among the best.

    python benchmarks/performance/offload_plans.py --folder DIR --json offload-plans.json

Makes a random Llama in the folder, and runs one block of each plan, from its first prompt token to its last new one:

* `random`: plans that are drawn among all that fit, over methods, codecs, weights, memories and lengths. How many are
  predicted within 20 %?
* `choice`: the plan that is searched for, and others that fit the same memory. How far is it behind the best?
* `overlap`: the plan that is searched for, with reads ahead and without, in turns.
* `schedules`: the fastest plans of the schedules row and zigzag, in turns, and the ratio that is predicted.

What is read is read past the page cache. Run it on a quiet machine.
"""

from __future__ import annotations

import argparse
import random
import statistics
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any

from script import begin, interval, keep

from millpond.budget import parse_bytes
from millpond.engine.config import EngineConfig
from millpond.engine.engine import Engine
from millpond.engine.offload.cost import CostModel
from millpond.engine.offload.kv_size import kv_size, planned
from millpond.engine.offload.model_size import model_size
from millpond.engine.offload.open import open_in_memory
from millpond.engine.offload.plan import ENGINE, Plan
from millpond.engine.offload.planner import constants_for
from millpond.engine.offload.search import Limits, blocks, predicted, search, solve
from millpond.engine.request import Request
from millpond.engine.sampling.params import SamplingParams
from millpond.errors import BudgetError
from millpond_lab.bench.offload.shapes import make_model, prompts_of

KINDS = ("random", "choice", "overlap", "schedules")
#: Schedules in which all of a block is there at once.
CAN = replace(ENGINE, schedules=("row", "zigzag"))
#: What random plans are drawn from: options of the engine, memories, and lengths of prompts and answers.
CONFIGS: tuple[dict[str, Any], ...] = (
    {"method": "full"},
    {"method": "full", "codec": "int4"},
    {"method": "full", "weights": "int4"},
    {"method": "h2o", "budget": "20%"},
    {"method": "h2o", "budget": "20%", "codec": "int4"},
    {"method": "h2o", "budget": "50%", "weights": "int4"},
    {"method": "snapkv", "budget": "20%"},
    {"method": "streaming", "budget": "30%"},
)
MEMORIES, LENGTHS = ("72MiB", "96MiB", "144MiB"), ((128, 16), (128, 32), (256, 16))


@dataclass(frozen=True)
class Case:
    """What plans are made for."""

    config: dict[str, Any]
    memory: str
    prompt: int
    new: int


#: Of the parts that compare plans.
ONE = Case({"method": "h2o", "budget": "20%"}, "96MiB", 128, 32)


class Model:
    """The model in its folder, and this machine."""

    def __init__(self, folder: Path, shape: str) -> None:
        make_model(folder, shape)
        self.folder, self.shape, self.packed = folder, shape, folder / "packed"
        self.packed.mkdir(exist_ok=True)
        self.machine = constants_for(folder, None)

    def cost(self, case: Case) -> CostModel:
        config = EngineConfig(**case.config)
        size = model_size(self.folder, config.weights)
        kv = kv_size(size, case.prompt, case.new, **planned(config), memory=parse_bytes(case.memory))
        return CostModel(size, kv, self.machine)

    def some_plan(self, case: Case, draw: random.Random) -> Plan | None:
        """One of the plans that fit; None where there is none."""
        cost, limits = self.cost(case), Limits(memory=parse_bytes(case.memory))
        found = list(blocks(cost, limits, CAN))
        for block in draw.sample(found, len(found)):
            if (shares := solve(cost, block, limits, CAN)) is not None:
                return predicted(cost, block, shares)
        return None

    def fastest(self, case: Case, **can: Any) -> Plan:
        return search(self.cost(case), Limits(memory=parse_bytes(case.memory)), replace(CAN, **can))

    def run(self, case: Case, plan: Plan, *, overlap: bool = True) -> float:
        """Seconds of one block."""
        opened = open_in_memory(
            self.folder,
            case.memory,
            plan,
            None,
            EngineConfig(**case.config),
            disk=self.packed,
            overlap=overlap,
            tiered={"overlap": overlap},
        )
        engine = Engine(opened.model, None, opened.config, streamed=opened.streamed, tier=opened.tier)
        params = SamplingParams(max_tokens=case.new, temperature=0, ignore_eos=True)
        assert plan.block is not None, "a plan that was searched for"
        for n, prompt in enumerate(prompts_of(plan.block, case.prompt, self.shape)):
            engine.add(Request(request_id=str(n), prompt=prompt, params=params))
        began = perf_counter()
        while engine.busy:
            for output in engine.step():
                if output.error is not None:
                    raise output.error
        seconds = perf_counter() - began
        engine.close()
        return seconds


def row(case: Case, plan: Plan, seconds: float, **more: Any) -> dict[str, Any]:
    assert plan.prediction is not None, "a plan that was searched for"
    assert plan.block is not None, "a plan that was searched for"
    found = {
        **case.config,
        "memory": case.memory,
        "prompt": case.prompt,
        "new": case.new,
        "schedule": plan.schedule,
        "block": plan.block,
        "micro_batch": plan.micro_batch,
        "prompt_rows": plan.prompt_rows,
        "slots": plan.slots,
        "weights_on_disk": plan.share("weights", "disk"),
        "kv_on_disk": plan.share("kv", "disk"),
        **more,
        "seconds": seconds,
        "predicted_s": plan.prediction.seconds,
        "tokens_per_s": plan.block * case.new / seconds,
    }
    print({name: round(value, 3) if isinstance(value, float) else value for name, value in found.items()}, flush=True)
    return found


def random_plans(model: Model, n: int, seed: int) -> dict[str, Any]:
    draw, rows = random.Random(seed), []
    while len(rows) < n:
        case = Case(draw.choice(CONFIGS), draw.choice(MEMORIES), *draw.choice(LENGTHS))
        try:
            plan = model.some_plan(case, draw)
        except BudgetError:
            continue
        if plan is not None:
            rows.append(row(case, plan, model.run(case, plan)))
    near = sum(0.8 <= one["seconds"] / one["predicted_s"] <= 1.2 for one in rows)
    print(f"{near} of {n} random plans within 20 %")
    return {"within_a_fifth": near, "plans": rows}


def choice(model: Model, n: int, seed: int) -> dict[str, Any]:
    draw, best = random.Random(seed), model.fastest(ONE)
    rows = [row(ONE, best, model.run(ONE, best))]
    for _ in range(n):
        plan = model.some_plan(ONE, draw)
        assert plan is not None, "one fits"
        rows.append(row(ONE, plan, model.run(ONE, plan)))
    ratio = rows[0]["tokens_per_s"] / max(one["tokens_per_s"] for one in rows)
    print(f"the chosen plan: {ratio:.3f} of the best of {n + 1}")
    return {"of_the_best": ratio, "plans": rows}


def overlap(model: Model, rounds: int) -> dict[str, Any]:
    plan, rows, ratios = model.fastest(ONE), [], []
    for n in range(rounds):
        seconds = {ahead: model.run(ONE, plan, overlap=ahead) for ahead in ((True, False) if n % 2 else (False, True))}
        rows += [row(ONE, plan, taken, overlap=ahead) for ahead, taken in seconds.items()]
        ratios.append(seconds[False] / seconds[True])
    print(f"reads ahead: {statistics.median(ratios):.2f} x as fast as without {interval(ratios)}")
    return {"ratio": statistics.median(ratios), "interval": interval(ratios), "plans": rows}


def schedules(model: Model, rounds: int) -> dict[str, Any]:
    plans = {one: model.fastest(ONE, schedules=(one,)) for one in ("row", "zigzag")}
    rows, ratios = [], []
    for n in range(rounds):
        order = list(plans) if n % 2 else list(plans)[::-1]
        found = {one: row(ONE, plans[one], model.run(ONE, plans[one])) for one in order}
        rows += list(found.values())
        ratios.append(found["zigzag"]["tokens_per_s"] / found["row"]["tokens_per_s"])
    rates = {one: plan.prediction.tokens_per_s for one, plan in plans.items() if plan.prediction is not None}
    wanted = rates["zigzag"] / rates["row"]
    print(f"zigzag by row: {statistics.median(ratios):.2f} {interval(ratios)}, predicted {wanted:.2f}")
    return {"ratio": statistics.median(ratios), "interval": interval(ratios), "predicted": wanted, "plans": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--shape", default="0.16B")
    parser.add_argument("--only", default=",".join(KINDS), help="Some of " + ", ".join(KINDS))
    parser.add_argument("--plans", type=int, default=10, help="Random ones.")
    parser.add_argument("--others", type=int, default=20, help="Plans that the chosen one is compared with.")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    args, _ = begin(parser)
    model = Model(args.folder, args.shape)
    parts = {
        "random": lambda: random_plans(model, args.plans, args.seed),
        "choice": lambda: choice(model, args.others, args.seed),
        "overlap": lambda: overlap(model, args.rounds),
        "schedules": lambda: schedules(model, args.rounds),
    }
    found = {name: parts[name]() for name in args.only.split(",")}
    args.folder = args.folder.name
    keep(args, [], **found)


if __name__ == "__main__":
    main()
