"""`millpond bench`: speed and memory, written as JSON and Markdown with the machine and the command."""

from __future__ import annotations

import re
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from millpond.cli.console import errors
from millpond.cli.options import ModelName, PluginFile, Threads, optional
from millpond.errors import OptionError
from millpond_lab.cli.bench import batch, chunks, cluster, engines, offload, paging, serve
from millpond_lab.cli.bench.common import check_share, command_line, deliver, parse_cells, saved_model, with_given
from millpond_lab.cli.options import BenchModelName, Quick, Report, WeightSeed

if TYPE_CHECKING:
    from millpond_lab.bench.generate.candidates import ModelShape

app = typer.Typer(no_args_is_help=True, help="Measure speed and memory, each with a baseline in the same run.")


@app.command()
def kernels(
    rounds: Annotated[int, typer.Option(min=1, help="Timed rounds; every round runs all kernels once.")] = 40,
    threads: Threads = None,
    out: Report = None,
) -> None:
    """Time the CPU kernels against the read bandwidth and torch's own attention."""
    import torch

    from millpond_lab.bench.common.machine import describe_machine
    from millpond_lab.bench.common.report import kernels_markdown
    from millpond_lab.bench.kernels.attention import kernel_table
    from millpond_lab.bench.kernels.quantized_decode import codec_table
    from millpond_lab.bench.kernels.shared_prefix import shared_rows

    torch.set_num_threads(threads or torch.get_num_threads())
    machine = describe_machine()
    with errors().status("timing kernels"):
        rows = kernel_table(rounds) + shared_rows(max(3, rounds // 2)) + codec_table(max(3, rounds // 2))
    data = {
        "benchmark": "kernels",
        "machine": machine.as_dict(),
        "hardware": machine.hardware,
        "software": machine.software,
        "command": command_line(),
        "rounds": rounds,
        "results": [{**asdict(row), "verdict": row.verdict} for row in rows],
    }
    deliver("kernels", data, kernels_markdown(data), out)


@app.command()
def generate(
    quick: Quick = False,
    model: BenchModelName = None,
    cells: Annotated[
        str | None, optional(help="Batch x prompt, separated by commas. Default: 1x2048,1x4096,4x2048.")
    ] = None,
    new_tokens: Annotated[int | None, optional(min=2, help="Tokens to generate. Default: 64.")] = None,
    repeats: Annotated[int | None, optional(min=1, help="Repetitions in turns. Default: 5.")] = None,
    budget: Annotated[str, typer.Option(help="A share of the prompt.")] = "20%",
    codec: Annotated[
        str | None,
        optional(help="Codecs separated by commas: our full cache in each, in bf16, and optimum-quanto's; no others."),
    ] = None,
    threads: Threads = None,
    seed: WeightSeed = 0,
    kvpress: Annotated[
        Path | None, optional(help="Python of an environment with kvpress (benchmarks/peers/kvpress_env.sh).")
    ] = None,
    out: Report = None,
) -> None:
    """Time generate() under our caches, transformers' and kvpress's, on the same model."""
    from millpond_lab.bench.common.report import generate_markdown
    from millpond_lab.bench.generate.candidates import coded_candidates
    from millpond_lab.bench.generate.run import QUICK, GeneratePlan, KVPress, run

    check_share(budget)
    if model is not None and kvpress is not None:
        raise OptionError("--kvpress makes random weights of its own: leave it out with --model")
    plan = with_given(
        QUICK if quick else GeneratePlan(),
        shape=saved_model(model),
        cells=parse_cells(cells),
        new_tokens=new_tokens,
        repeats=repeats,
        budget=budget,
        threads=threads,
        seed=seed,
    )
    candidates = coded_candidates(codec.split(",")) if codec else None
    child = KVPress(kvpress, Path("benchmarks/peers/kvpress_generate.py")) if kvpress else nullcontext()
    with errors().status("measuring") as status, child as peer:
        data = run(plan, candidates, peer=peer, progress=status.update)
    if candidates:
        data["anchor"], data["anchor_setting"] = candidates[0].name, candidates[0].setting
    data["command"] = command_line()
    name = "generate-codecs" if codec else "generate"
    deliver(f"{name}-quick" if quick else name, data, generate_markdown(data), out)


@app.command()
def methods(
    methods: Annotated[
        str | None, optional(help="Separated by commas; options as in h2o:recent=0.1. Default: all there are.")
    ] = None,
    plugin: PluginFile = None,
    quick: Quick = False,
    shape: Annotated[
        str | None,
        optional(help="Shape of the model: layers x width x heads/KV heads x head size. Default: 4x1024x16/4x64."),
    ] = None,
    prompt: Annotated[int | None, optional(min=1, help="Tokens of the prompt. Default: 4096.")] = None,
    new_tokens: Annotated[int | None, optional(min=2, help="Steps to time in each repetition. Default: 64.")] = None,
    repeats: Annotated[int | None, optional(min=1, help="Repetitions, with fresh caches. Default: 4.")] = None,
    budget: Annotated[str, typer.Option(help="A share of the prompt, or entries per KV head.")] = "20%",
    threads: Threads = None,
    seed: WeightSeed = 0,
    out: Report = None,
) -> None:
    """Time every method in turns with snapkv: prefill, the plan's share of it, decoding, and bytes held."""
    from millpond.budget import Budget
    from millpond.plugin_file import load_plugin
    from millpond_lab.bench.common.report import methods_markdown
    from millpond_lab.bench.methods.run import QUICK, MethodsPlan, run
    from millpond_lab.evals.spec import parse_specs

    load_plugin(plugin)
    Budget.parse(budget)
    plan = with_given(
        QUICK if quick else MethodsPlan(),
        shape=_shape(shape) if shape else None,
        prompt=prompt,
        methods=tuple((s.name, s.options) for s in parse_specs(methods, "methods")) if methods else None,
        new_tokens=new_tokens,
        repeats=repeats,
        budget=budget,
        threads=threads,
        seed=seed,
    )
    with errors().status("measuring") as status:
        data = run(plan, status.update)
    data["command"] = command_line()
    deliver("methods-quick" if quick else "methods", data, methods_markdown(data), out)


@app.command()
def stream(
    tokens: Annotated[int, typer.Option(min=100, help="Length of the text.")] = 1_000_000,
    methods: Annotated[str, typer.Option(help="Separated by commas.")] = "streaming,h2o",
    plugin: PluginFile = None,
    budget: Annotated[int, typer.Option(min=8, help="Entries per KV head.")] = 256,
    model: ModelName = "pond-recall",
    threads: Threads = None,
    seed: Annotated[int, typer.Option(help="Seed of the text.")] = 0,
    out: Report = None,
) -> None:
    """Feed endless text to a model one token at a time: memory and step time, from beginning to end."""
    import torch

    from millpond.models.load import load_model
    from millpond.plugin_file import load_plugin
    from millpond_lab.bench.common.report import stream_markdown
    from millpond_lab.bench.stream import run

    load_plugin(plugin)
    torch.set_num_threads(threads or torch.get_num_threads())
    names = [name.strip() for name in methods.split(",")]
    with errors().status("streaming") as status:
        data = run(load_model(model), names, tokens, budget, seed, status.update)
    data["command"] = command_line()
    deliver("stream", data, stream_markdown(data), out)


def _shape(text: str) -> ModelShape:
    """A shape from "4x1024x16/4x64"; its feed-forward layers are 2.75 times as wide as the model."""
    from millpond_lab.bench.generate.candidates import ModelShape

    found = re.fullmatch(r"(\d+)x(\d+)x(\d+)/(\d+)x(\d+)", text.strip())
    numbers = [int(n) for n in found.groups()] if found else [0]
    if not all(numbers):
        raise OptionError(f"shape {text!r} must read LAYERSxWIDTHxHEADS/KV_HEADSxHEAD_SIZE, for example 4x1024x16/4x64")
    layers, width, heads, kv_heads, head_dim = numbers
    if heads % kv_heads or head_dim % 2:
        raise OptionError(f"shape {text!r}: query heads must be a multiple of KV heads, and the head size even")
    return ModelShape(layers, width, heads, kv_heads, head_dim, ffn=max(1, width * 11 // 4))


app.command("batch")(batch.batch)
app.command("chunks")(chunks.chunks)
app.command("engines")(engines.engines)
app.command("offload")(offload.offload)
app.command("paging")(paging.paging)
app.command("serve")(serve.serve)
app.command("cluster")(cluster.cluster)
