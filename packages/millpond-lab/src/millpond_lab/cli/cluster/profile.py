"""`millpond cluster profile`: step times of a model on this machine, for `millpond cluster plan`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from millpond.cli.console import errors, notes, output
from millpond.cli.options import CacheChoice, DtypeName, ModelName, Threads, TrustRemoteCode, expand_groups
from millpond.errors import OptionError


@expand_groups
def profile(
    *,
    out: Annotated[Path, typer.Option(help="JSON file of the profile.")],
    model: ModelName = "pond-recall",
    dtype: DtypeName = "auto",
    cache: CacheChoice,
    prompts: Annotated[str, typer.Option(help="Tokens of the prompts, separated by commas.")] = "32,128,256,512",
    new: Annotated[int, typer.Option(min=2, help="Tokens of an answer.")] = 24,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds that are measured.")] = 2,
    threads: Threads = None,
    trust_remote_code: TrustRemoteCode = False,
    replicas: Annotated[int | None, typer.Option(min=1, help="Time as many workers that run at once.")] = None,
    prefill: Annotated[int | None, typer.Option(min=1, help="The same, of workers that read prompts.")] = None,
    decode: Annotated[int | None, typer.Option(min=1, help="And of those that decode behind them.")] = None,
) -> None:
    """Time an engine's steps over prompts of several lengths at several rates of arrivals, and moves; a minute or two.

    With --replicas, or --prefill and --decode, the engines are workers on this machine, with all that they take from
    each other.
    """
    import asyncio

    from millpond.cluster.async_llm import AsyncClusterLLM
    from millpond.engine.async_llm import AsyncLLM
    from millpond.models.load import load_model
    from millpond_lab.bench.common.machine import describe_machine
    from millpond_lab.cluster_plan.measure import Measured, measure
    from millpond_lab.cluster_plan.profile_file import save_profile
    from millpond_lab.cluster_plan.record import RecordedEngines

    parts = [part.strip() for part in prompts.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise OptionError(f"--prompts {prompts!r} must read 32,128,256: tokens, separated by commas")
    lengths = [int(part) for part in parts]
    numbers: dict[str, Any] = {"replicas": replicas, "prefill": prefill, "decode": decode}
    workers = sum(n or 0 for n in numbers.values())
    note = describe_machine().hardware
    if workers:
        note += "; workers at once: " + ", ".join(f"{n} {name}" for name, n in numbers.items() if n)
    with notes(), errors().status("measuring") as status:

        async def measured() -> Measured:
            llm: AsyncLLM | AsyncClusterLLM
            kept: dict[str, Any] = {"options": cache.options, "calibration": cache.calibration, **cache.kept()}
            if workers:
                llm = AsyncClusterLLM(
                    model, dtype=dtype, threads=threads, trust_remote_code=trust_remote_code, **numbers, **kept
                )
            else:
                llm = AsyncLLM(load_model(model, dtype, trust_remote_code=trust_remote_code), threads=threads, **kept)
            try:
                return await measure(
                    RecordedEngines(llm),
                    model,
                    prompts=lengths,
                    new=new,
                    rounds=rounds,
                    note=note,
                    report=status.update,
                    workers=workers or 1,
                )
            finally:
                await llm.close(drain=False)

        found = asyncio.run(measured())
    save_profile(found.profile, out)
    output().print(
        f"{out}: {len(found.steps):,} steps; the fit is off by {100 * found.error:.0f} % of a step in the median",
        soft_wrap=True,
        highlight=False,
    )
    if found.refused is not None:
        text = f"requests of this engine cannot move, so no split can be built of it: {found.refused}"
    else:
        moves, moved = found.profile.moves, found.profile.cache.moved(max(lengths))
        text = (
            f"a move of {max(lengths):,} tokens, {moved / 1e6:,.1f} MB: {1e3 * moves.packing(moved):.1f} ms to pack, "
            f"{1e3 * moves.taking_in(moved):.1f} ms to take in"
        )
    if found.latency_s is not None:
        text += f", {1e3 * found.latency_s:.1f} ms on its way (--latency of a plan)"
    output().print(text, soft_wrap=True, highlight=False)
