"""Options of several commands, each written once, and the options of a method: `-o name=value`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from millpond.errors import OptionError

#: A `typer.Option` whose default, None, needs no showing.
optional = partial(typer.Option, show_default=False)

ModelName = Annotated[str, typer.Option(help="A name of `millpond models`, a folder, a GGUF file, or a hub id.")]
BenchModelName = Annotated[
    str | None,
    optional(help="Trained weights: a name of `millpond models`, a folder or a GGUF file. Default: random ones."),
]
MethodName = Annotated[str, typer.Option(help="What is kept: see 'millpond methods'.")]
CodecName = Annotated[
    str,
    typer.Option(
        help="Number format of the entries, see 'millpond codecs'; \"0-1=bf16;*=int4\" by layer, "
        '"bf16:20%;int8:20%;int4" by age.'
    ),
]
CalibrationFile = Annotated[
    str | None, optional(help="A file of 'millpond calibrate', for kvquant2, kvquant3 and kvquant4.")
]
DtypeName = Annotated[str, typer.Option(help="auto, f32, bf16 or f16; float32, bfloat16 and float16 are the same.")]
NewTokens = Annotated[int, typer.Option("--max-new-tokens", "--max-tokens", min=1, help="New tokens, at most.")]
ChunkDtype = Annotated[
    str, typer.Option(help="Numbers of stored chunks: auto (as the model computes them), float32, bf16, int8 or int4.")
]
DeviceName = Annotated[str | None, optional(help="cpu, cuda or cuda:1. Default: cuda if there is one.")]
TrustRemoteCode = Annotated[
    bool,
    typer.Option(
        "--trust-remote-code",
        help="Run the code in the model's folder, where it brings some. Default: such a model is refused.",
    ),
]
BudgetFloor = Annotated[
    int,
    typer.Option(
        min=0, help="Tokens that a --budget which is a share keeps at least of each prompt; 0: the share alone."
    ),
]
Threads = Annotated[int | None, optional(min=1, help="CPU threads of torch. Default: torch's own choice.")]
Memory = Annotated[
    str | None,
    optional(
        help="Limit of the host's memory for weights, caches and buffers together ('512MiB'); layers that do not "
        "fit are read from the model's folder in every step. Default: no limit."
    ),
]
DeviceMemory = Annotated[
    str | None,
    optional(
        help="Limit of the device's memory for weights, caches and buffers together ('16GiB'); layers that do not fit "
        "are copied there in every step. Default: no limit."
    ),
]
Disk = Annotated[
    Path | None,
    optional(help="Folder for packed --weights and other files of a model that runs with --memory. Default: none."),
]
OverflowRule = Annotated[
    str,
    typer.Option(
        "--overflow",
        help="Texts longer than the model's context: refuse them, or rolling: what the cache keeps moves to its "
        "beginning, and the text goes on.",
    ),
]
PressureRule = Annotated[
    str,
    typer.Option(
        "--on-pressure",
        help="Prompts of which anything would be evicted: refuse them before they are read, or evict, as the method "
        "does. Requests may say otherwise.",
    ),
]
Weights = Annotated[
    str | None,
    optional(help="Pack the model's matrices: int8 or int4 (models that run natively, on a CPU). Default: no."),
]
Temperature = Annotated[float, typer.Option(help="0 takes the most likely token.")]
TopP = Annotated[float, typer.Option(help="Sample from the most likely tokens of this total probability.")]
TypicalP = Annotated[
    float, typer.Option(help="Sample from the tokens of this total probability whose surprise is closest to average.")
]
Chat = Annotated[
    bool | None, optional("--chat/--no-chat", help="Wrap the prompt in the chat template. Default: if there is one.")
]
Samples = Annotated[int, typer.Option(min=1, help="Samples of each task.")]
SampleSeed = Annotated[int, typer.Option(help="Seed of the samples and the intervals.")]
Report = Annotated[Path | None, optional(help="Write JSON and Markdown here.")]
Quick = Annotated[bool, typer.Option("--quick", help="Tiny sizes: a check of the machinery, not a result.")]
WeightSeed = Annotated[int, typer.Option(help="Seed of weights, prompts and order.")]


def parse_options(pairs: Sequence[str], example: str = "recent=0.25") -> dict[str, str]:
    """{"name": "value"} from ["name=value", ...]; what the text means is the registry's to decide.

    Raises:
        OptionError: no "=" in a pair, or a name given twice.

    Example:
        >>> parse_options(["recent=0.25", "sinks=4"])
        {'recent': '0.25', 'sinks': '4'}
    """
    options: dict[str, str] = {}
    for pair in pairs:
        name, separator, value = pair.partition("=")
        if not separator or not name:
            raise OptionError(f"option {pair!r} must read name=value, for example {example}")
        if name in options:
            raise OptionError(f"option {name!r} is given twice")
        options[name] = value
    return options
