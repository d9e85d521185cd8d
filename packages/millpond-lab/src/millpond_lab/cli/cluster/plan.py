"""`millpond cluster plan`: goodput of layouts of workers by simulation, and whether prompts are to be read apart."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from millpond.cli.console import errors, output
from millpond.cli.options import optional
from millpond.errors import OptionError

if TYPE_CHECKING:
    from millpond_lab.cluster_plan.place import Goodput

#: Bits per second in a word such as 25Gbit.
_BITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}


def plan(
    trace: Annotated[str, typer.Option(metavar="KIND:PATH", help="azure or mooncake, and a path.")],
    slo: Annotated[str, typer.Option(help="Service levels in seconds: ttft=0.2,tpot=0.1.")],
    devices: Annotated[int, typer.Option(min=1, help="Devices in all.")],
    profile: Annotated[
        str, typer.Option(help="A file of 'millpond cluster profile', or a100:opt-13b or a100:opt-66b, as published.")
    ] = "a100:opt-13b",
    per_node: Annotated[int | None, optional(min=1, help="Devices of a node. Default: all are in one.")] = None,
    stages: Annotated[
        str,
        typer.Option(
            help="Stages of a pipeline that a worker may have, as in 1,2,4; with the devices that share each "
            "layer, which the profile has, each phase is searched over both."
        ),
    ] = "1",
    budget: Annotated[
        str | None, optional(help="Entries that are kept of a prompt, as in 20%, for built-in profiles. Default: all.")
    ] = None,
    codec: Annotated[str, typer.Option(help="Number format of kept entries, for built-in profiles.")] = "auto",
    link: Annotated[str, typer.Option(help="Bits per second between workers: 25Gbit, 100Mbit.")] = "100Gbit",
    latency: Annotated[float, typer.Option(min=0, help="Seconds that a move takes whatever its bytes.")] = 0.001,
    overhead: Annotated[
        float,
        typer.Option(min=0, max=60, help="Seconds that each step takes longer in a worker, which sends its tokens."),
    ] = 0.0,
    memory: Annotated[str | None, optional(help="For caches on each device, as in 40GiB. Default: no limit.")] = None,
    anywhere: Annotated[
        bool, typer.Option("--anywhere", help="The link is between all nodes, so phases are placed by themselves.")
    ] = False,
    longest: Annotated[int, typer.Option(min=2, help="Leave out requests whose prompt and answer are longer.")] = 2048,
    requests: Annotated[int, typer.Option(min=10, help="Requests of one simulation.")] = 1000,
    seeds: Annotated[int, typer.Option(min=1, help="Simulations of each rate, with other requests.")] = 3,
    out: Annotated[Path | None, optional(help="Write the plan here, as JSON.")] = None,
    watch: Annotated[
        float | None,
        optional(
            min=1,
            help="Read the trace again after as many seconds, and plan again if its newest requests (--newest) are "
            "longer or shorter in the mean by a fifth. Ctrl-C ends it.",
        ),
    ] = None,
    newest: Annotated[
        int | None, optional(min=10, help="Plan for as many of the newest requests of the trace. Default: all.")
    ] = None,
) -> None:
    """Compare layouts of workers by goodput per device, and say whether to read prompts apart from answers."""
    import time

    from millpond.budget import parse_bytes
    from millpond_lab.bench.serve.run import parse_levels
    from millpond_lab.cluster_plan.layout import Link
    from millpond_lab.cluster_plan.place import Demand, Devices, ServiceLevels, compare
    from millpond_lab.cluster_plan.place import watch as follow
    from millpond_lab.cluster_plan.profile_file import load_profile
    from millpond_lab.cluster_plan.report import judge, save_plan

    levels = parse_levels(slo)
    if levels.keys() != {"ttft", "tpot"}:
        raise OptionError(f"--slo {slo!r} must give both levels: ttft=0.2,tpot=0.1")
    known = load_profile(profile).with_cache(budget, codec)
    per_device = None if memory is None else parse_bytes(memory)
    times = {n: one.with_overhead(overhead) for n, one in known.times.items()}
    there = Devices(times, devices, per_node or devices, per_device, known.step_tokens, known.moves, _numbers(stages))
    between = Link(_bytes_per_s(link), latency)

    def read() -> list[tuple[int, int]]:
        found = _lengths(trace, longest)
        return found if newest is None else found[-newest:]

    def plan_for(lengths: Sequence[tuple[int, int]]) -> None:
        demand = Demand(lengths, ServiceLevels(**levels), requests, tuple(range(seeds)))
        with errors().status("simulating") as status:
            rows = compare(there, known.cache, between, demand, anywhere=anywhere, report=status.update)
            verdict = judge(rows, known.cache, between, demand)
        _show(f"{known.name}, {slo}, nine of ten requests", rows, verdict.reasons)
        if out is not None:
            save_plan(out, rows, verdict, devices)

    if watch is None:
        plan_for(read())
        return
    with suppress(KeyboardInterrupt):
        follow(read, plan_for, lambda: time.sleep(watch), lambda text: output().print(text, soft_wrap=True))


def _numbers(text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and len(part) < 4 for part in parts):
        raise OptionError(f"--stages {text!r} must read 1,2,4")
    return tuple(int(part) for part in parts)


def _show(title: str, rows: Sequence[Goodput], reasons: Sequence[str]) -> None:
    table = Table(title=title)
    for name in ("layout", "devices", "goodput per device", "over the seeds", "MB moved"):
        table.add_column(name, justify="left" if name == "layout" else "right")
    for row in rows:
        table.add_row(*_cells(row))
    output().print(table)
    for reason in reasons:
        output().print(reason, soft_wrap=True, highlight=False)


def _cells(row: Goodput) -> tuple[str, ...]:
    low, high = row.interval
    moved = f"{row.moved / 1e6:,.1f}" if row.moved else ""
    rate = f"{'at least ' if row.at_least else ''}{row.per_device:.2f}"
    return row.layout.name, str(row.layout.devices), rate, f"{low:.2f} to {high:.2f}", moved


def _lengths(trace: str, longest: int) -> list[tuple[int, int]]:
    """(prompt, output) tokens of a trace's requests that are not too long."""
    from millpond.errors import unknown
    from millpond_lab.bench.serve.requests import TRACES, TokenBlocks

    kind, colon, path = trace.partition(":")
    if not colon:
        raise OptionError(f"trace {trace!r} must read KIND:PATH, for example azure:azure2023_conv.csv")
    known = {name: TRACES[name] for name in ("azure", "mooncake")}
    if kind not in known:
        raise unknown("trace", kind, known)
    asks = known[kind](Path(path))
    pairs = [(ask.prompt.length, ask.output_tokens) for ask in asks if isinstance(ask.prompt, TokenBlocks)]
    found = [(prompt, answer) for prompt, answer in pairs if prompt + answer < longest]
    if not found:
        raise OptionError(f"no request of {trace} has fewer than {longest:,} tokens; raise --longest")
    return found


def _bytes_per_s(text: str) -> float:
    number, unit = text.rstrip("abcdefghijklmnopqrstuvwxyzGMKB "), text.lstrip("0123456789. ").strip().lower()
    try:
        bits = float(number) * _BITS[unit]
    except (KeyError, ValueError):
        raise OptionError(f"link {text!r} must read 25Gbit, 100Mbit or 64kbit, per second") from None
    if not 0 < bits < float("inf"):
        raise OptionError(f"link {text!r} must be above 0")
    return bits / 8
