"""Whether to read prompts apart from answers: three loads, caches that are full or compressed, and four links.

    python benchmarks/performance/whether_to_split.py --traces FOLDER [--json FILE] [--picture FILE] [--plans FOLDER]

A simulation of OPT-13B on A100 with the step times that DistServe's authors published; nothing is measured. For each
load and cache all layouts of up to `--devices` devices are compared by goodput per device, at each link, by the code of
`millpond cluster plan`.
"""

from __future__ import annotations

import argparse
import json
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from millpond_lab.bench.serve.requests import TRACES, TokenBlocks
from millpond_lab.cluster_plan.layout import Link
from millpond_lab.cluster_plan.place import Demand, Devices, Goodput, ServiceLevels, compare
from millpond_lab.cluster_plan.profile_file import built_in
from millpond_lab.cluster_plan.report import judge, to_json

#: Gbit per second between two workers.
LINKS = (1, 10, 100, 400)
#: Budget and number format by name.
CACHES = {"full": (None, "auto"), "h2o 20 % + int4": ("20%", "int4")}
#: Bytes for caches on each device of 80 GB, besides weights and what a step needs.
MEMORY = 40 << 30


@dataclass(frozen=True)
class Story:
    """A load. longest: requests with more tokens are left out. ttft, tpot: levels in seconds."""

    name: str
    kind: str
    file: str
    longest: int
    ttft: float
    tpot: float


STORIES = (
    Story("chat, three devices", "azure", "azure2023_conv.csv", 2048, 0.4, 0.03),
    Story("chat, quick answers", "azure", "azure2023_conv.csv", 2048, 0.4, 0.04),
    Story("code", "azure", "azure2023_code.csv", 8192, 1.5, 0.06),
    Story("long documents", "mooncake", "mooncake_conversation.jsonl", 16384, 15.0, 0.06),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, required=True, help="Folder with the published traces.")
    parser.add_argument("--devices", type=int, default=3)
    parser.add_argument("--requests", type=int, default=400, help="Of one simulation.")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--stories", nargs="+", default=[story.name for story in STORIES])
    parser.add_argument("--jobs", type=int, default=1, help="Rows that are simulated at once.")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--plans", type=Path, help="Folder for one plan of each story and link, as `serve` reads it.")
    args = parser.parse_args()
    tasks = [
        (story, cache, gbit) for story in STORIES if story.name in args.stories for cache in CACHES for gbit in LINKS
    ]
    rows: list[dict[str, Any]] = []
    with ProcessPoolExecutor(args.jobs) as pool:
        for row in pool.map(partial(tell, args), tasks):
            rows.append(row)
            print(row["story"], row["cache"], row["gbit_per_s"], "Gbit/s:", *row["reasons"], flush=True)
            if args.json:
                args.json.write_text(json.dumps(as_data(args, rows), indent=1) + "\n")
    if args.json:
        args.json.with_suffix(".md").write_text(as_table(rows))
    if args.picture:
        draw(rows, args.picture)


def tell(args: argparse.Namespace, task: tuple[Story, str, int]) -> dict[str, Any]:
    """One row: the best layouts with and without a split, and the verdict."""
    story, cache_name, gbit = task
    demand = Demand(
        lengths(story, args.traces), ServiceLevels(story.ttft, story.tpot), args.requests, tuple(range(args.seeds))
    )
    profile = built_in("opt-13b").with_cache(*CACHES[cache_name])
    devices = Devices(profile.times, args.devices, args.devices, MEMORY)
    link = Link(gbit * 1e9 / 8, 0.001)
    rows = compare(devices, profile.cache, link, demand)
    rows = [row for row in rows if len(row.rates) == args.seeds]  # the best two of each kind
    verdict = judge(rows, profile.cache, link, demand)
    both, apart = (
        max((row for row in rows if row.layout.splits is split), key=lambda row: row.per_device)
        for split in (False, True)
    )
    if args.plans:
        args.plans.mkdir(parents=True, exist_ok=True)
        name = f"{story.name} {cache_name} {gbit} Gbit".replace(" % + ", "-").replace(",", "").replace(" ", "-")
        plan = to_json(rows, verdict, args.devices)
        (args.plans / f"{name}.json").write_text(json.dumps(plan, indent=1) + "\n")
    return {
        "story": story.name,
        "ttft_s": story.ttft,
        "tpot_s": story.tpot,
        "cache": cache_name,
        "gbit_per_s": gbit,
        "split": verdict.split,
        "together": summary(both),
        "apart": summary(apart),
        "moved_bytes": apart.moved,
        "reasons": list(verdict.reasons),
    }


def lengths(story: Story, folder: Path) -> list[tuple[int, int]]:
    """(prompt, output) tokens of the requests of a trace that are short enough."""
    asks = TRACES[story.kind](folder / story.file)
    pairs = [(ask.prompt.length, ask.output_tokens) for ask in asks if isinstance(ask.prompt, TokenBlocks)]
    return [(prompt, answer) for prompt, answer in pairs if prompt + answer < story.longest]


def summary(row: Goodput) -> dict[str, Any]:
    """A layout and its goodput per device, with the range of the seeds."""
    low, high = row.interval
    return {"layout": row.layout.name, "goodput_per_device": row.per_device, "lowest": low, "highest": high}


def as_data(args: argparse.Namespace, rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "model": "opt-13b, step times of A100 as published with DistServe's simulator",
        "memory_bytes": MEMORY,
        "devices": args.devices,
        "requests": args.requests,
        "seeds": args.seeds,
        "results": rows,
    }


def as_table(rows: list[dict[str, Any]]) -> str:
    """All rows in Markdown."""
    lines = [
        "# Whether to split: simulated goodput in requests per second and device",
        "",
        "OPT-13B on A100 with published step times; `benchmarks/performance/whether_to_split.py`.",
        "",
        "| load | cache | Gbit/s | MB moved | together | apart | layout apart | split |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        both, apart = row["together"], row["apart"]
        lines.append(
            f"| {row['story']} | {row['cache']} | {row['gbit_per_s']} | {row['moved_bytes'] / 1e6:,.0f} | "
            f"{_rate(both)} | {_rate(apart)} | {apart['layout']} | {'**yes**' if row['split'] else 'no'} |"
        )
    return "\n".join(lines) + "\n"


def _rate(row: dict[str, Any]) -> str:
    return f"{row['goodput_per_device']:.2f} ({row['lowest']:.2f}–{row['highest']:.2f})"


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Goodput of the best layouts against the link, one panel for each load."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = list(dict.fromkeys(row["story"] for row in rows))
    figure, panels = plt.subplots(1, len(names), figsize=(3.2 * len(names), 3.2), squeeze=False)
    for panel, name in zip(panels[0], names, strict=True):
        for cache, color in zip(CACHES, ("C0", "C1"), strict=True):
            chosen = [row for row in rows if row["story"] == name and row["cache"] == cache]
            links = [row["gbit_per_s"] for row in chosen]
            apart = [row["apart"]["goodput_per_device"] for row in chosen]
            both = [row["together"]["goodput_per_device"] for row in chosen]
            panel.plot(links, apart, "o-", color=color, label=f"apart, {cache}")
            panel.plot(links, both, "--", color=color, label=f"together, {cache}")
        panel.set(title=name, xscale="log", xlabel="Gbit/s between workers", ylim=(0, None))
        panel.set_xticks(LINKS, [str(link) for link in LINKS])
    panels[0][0].set_ylabel("requests/s per device")
    panels[0][0].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    main()
