"""`millpond bench serve`: load on any OpenAI-compatible server, with latency and goodput."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from millpond.cli.console import errors, output
from millpond.cli.options import optional
from millpond.errors import OptionError
from millpond_lab.cli.bench.common import command_line
from millpond_lab.cli.options import Report

if TYPE_CHECKING:
    from millpond_lab.bench.serve.requests import LoadRequest


def serve(
    url: Annotated[str, typer.Option(help="Address of the server, with or without /v1.")] = "http://127.0.0.1:8000",
    model: Annotated[str | None, optional(help="Default: the first that the server names.")] = None,
    trace: Annotated[
        str | None, optional(metavar="KIND:PATH", help="azure, mooncake or agents, and a path. Default: synthetic.")
    ] = None,
    requests: Annotated[int, typer.Option(min=1, help="Requests to send, at most, from the beginning.")] = 100,
    rate: Annotated[float | None, optional(min=0.001, help="Poisson arrivals per second (open loop).")] = None,
    users: Annotated[
        int | None, optional(min=1, help="Users, each of whom waits for its answer (closed loop).")
    ] = None,
    speed: Annotated[float, typer.Option(min=0.001, help="Factor on the rate of a trace.")] = 1.0,
    shrink: Annotated[int, typer.Option(min=1, help="Divisor of the lengths of a trace's prompts and answers.")] = 1,
    max_prompt: Annotated[int | None, optional(min=1, help="Leave out longer prompts of token ids.")] = None,
    prompt_tokens: Annotated[str, typer.Option(help="Length of synthetic prompts: 512 or 256-1024.")] = "512",
    output_tokens: Annotated[str, typer.Option(help="Length of answers to synthetic prompts: 64 or 16-128.")] = "64",
    shared_tokens: Annotated[int, typer.Option(min=0, help="Common prefix of all synthetic prompts, in tokens.")] = 0,
    vocab_size: Annotated[int, typer.Option(min=2, help="Synthetic tokens are below this id.")] = 256,
    chat: Annotated[bool, typer.Option("--chat", help="Use /v1/chat/completions; for loads of text.")] = False,
    ignore_eos: Annotated[bool, typer.Option(help="Request answers of the load's length.")] = True,
    slo: Annotated[str | None, optional(help="Service levels in seconds: ttft=2,tpot=0.1,e2e=30.")] = None,
    extra: Annotated[str | None, optional(metavar="JSON", help="More fields for each request's body.")] = None,
    key_variable: Annotated[
        str, typer.Option(help="Environment variable with the key, sent as a bearer token.")
    ] = "OPENAI_API_KEY",
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds without a byte until a request fails.")] = 600.0,
    seed: Annotated[int, typer.Option(min=0, help="Seed of arrivals, lengths and tokens.")] = 0,
    out: Report = None,
) -> None:
    """Send a trace or a synthetic load to a server; report times, goodput under service levels, and failures."""
    from millpond_lab.bench.common.report import write_report
    from millpond_lab.bench.serve.requests import Span, synthetic
    from millpond_lab.bench.serve.run import LoadPlan, parse_levels, run
    from millpond_lab.bench.serve.table import markdown, screen

    if trace is None:
        spans = Span.parse(prompt_tokens), Span.parse(output_tokens)
        name = f"synthetic, {prompt_tokens} tokens, {output_tokens} new" + f", {shared_tokens} shared" * bool(
            shared_tokens
        )
        asks = synthetic(requests, *spans, shared_tokens, seed)
        if rate is None and users is None:
            raise OptionError("a synthetic load has no times of its own; give --rate or --users")
    else:
        name, asks = trace, _read(trace, requests, shrink, max_prompt)
    plan = LoadPlan(
        url=url,
        model=model,
        api_key=os.environ.get(key_variable),
        timeout_s=timeout,
        rate=rate,
        users=users,
        speed=speed,
        chat=chat,
        vocab_size=vocab_size,
        ignore_eos=ignore_eos,
        extra=_json(extra),
        levels=parse_levels(slo),
        seed=seed,
    )
    with errors().status("sending") as status:
        data = asyncio.run(run(plan, asks, lambda done, n: status.update(f"{done:,} of {n:,} answered")))
    data |= {"benchmark": "serve", "trace": name, "command": command_line()}
    output().print(screen(data))
    for file in write_report(out, "serve", data, markdown(data)) if out else []:
        typer.echo(f"wrote {file}")


def _read(trace: str, requests: int, shrink: int, max_prompt: int | None) -> list[LoadRequest]:
    """The first asks of a trace, shrunk, without those that are too long."""
    from millpond.errors import unknown
    from millpond_lab.bench.serve.requests import TRACES

    kind, colon, path = trace.partition(":")
    if not colon:
        raise OptionError(f"trace {trace!r} must read KIND:PATH, for example azure:azure2023_conv.csv")
    if kind not in TRACES:
        raise unknown("trace", kind, TRACES)
    asks = [ask.shrunk(shrink) for ask in TRACES[kind](Path(path))]
    fitting = [
        ask for ask in asks if max_prompt is None or isinstance(ask.prompt, str) or ask.prompt.length <= max_prompt
    ]
    if not fitting:
        raise OptionError(f"no prompt of {trace} has at most {max_prompt} tokens; raise --max-prompt or --shrink")
    return fitting[:requests]


def _json(text: str | None) -> dict[str, Any]:
    try:
        value = json.loads(text or "{}")
    except ValueError as error:
        raise OptionError(f"--extra is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise OptionError(f'--extra must be an object, such as {{"seed": 1}}, not {text}')
    return value
