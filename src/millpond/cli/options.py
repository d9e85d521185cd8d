"""Options that several commands share, and those of a method: `-o name=value`, checked by the registry."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any

import typer

from millpond.budget import DEFAULT
from millpond.errors import OptionError
from millpond.presets import preset as preset_of

#: A `typer.Option` whose default, None, needs no showing.
optional = partial(typer.Option, show_default=False)

ModelName = Annotated[str, typer.Option(help="A folder, a hub id, or a bundled model.")]
MethodName = Annotated[str, typer.Option(help="What is kept: see 'millpond methods'.")]
MethodOptions = Annotated[
    list[str] | None,
    optional("--option", "-o", metavar="NAME=VALUE", help="Of the method: see 'millpond methods NAME'."),
]
BudgetText = Annotated[
    str | None,
    optional(
        help=f"'20%' of the prompt, 512 tokens per KV head, or '64MiB' in all. Default: {DEFAULT}; full takes none."
    ),
]
CodecName = Annotated[str, typer.Option(help="How entries are stored: see 'millpond codecs'.")]
CalibrationFile = Annotated[
    str | None, optional(help="A file of 'millpond calibrate', for kvquant2, kvquant3 and kvquant4.")
]
PresetName = Annotated[str | None, optional(help="light, balanced or tiny: method, budget and codec in one word.")]
DtypeName = Annotated[str, typer.Option(help="auto, f32, bf16 or f16.")]
DeviceName = Annotated[str | None, optional(help="cpu, cuda or cuda:1. Default: cuda if there is one.")]
PromptFile = Annotated[str | None, optional(help="Read the prompt from this file; - is standard input.")]
Chat = Annotated[
    bool | None, optional("--chat/--no-chat", help="Wrap the prompt in the chat template. Default: if there is one.")
]


def kept_as(
    context: typer.Context, preset: str | None, method: str | None, budget: str | None, codec: str | None
) -> dict[str, Any]:
    """Method, budget and codec: those of the preset, or as given where there is none.

    Raises:
        OptionError: no such preset, or one beside an option that it decides.
    """
    if preset is None:
        return {"method": method, "budget": budget, "codec": codec}
    chosen = preset_of(preset)
    for name in ("method", "budget", "codec"):
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            raise OptionError(f"--preset {preset} decides the {name} too; leave out --{name} or --preset")
    return {"budget": None, **chosen}


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
