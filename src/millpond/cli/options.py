"""Options that commands share, each written once: of the cache, the model, the prompt, and `-o name=value`."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from millpond.budget import DEFAULT
from millpond.errors import OptionError
from millpond.presets import preset as preset_of

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase


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


#: Name of the parameter through which typer passes the command's context.
_CONTEXT = "context"


@dataclass(frozen=True, kw_only=True)
class OptionGroup:
    """Base of option groups, whose fields are annotated as parameters of a command are.

    Attributes:
        given: names of the fields that the user set on the command line; no option itself.
    """

    given: frozenset[str] = frozenset()


def expand_groups(command: Callable[..., None]) -> Callable[..., None]:
    """A command for typer, with every parameter of an `OptionGroup` type replaced by the options of that group.

    The default of such a parameter, a group, gives the defaults of the options; without one they are the fields' own.
    """
    signature = inspect.signature(command, eval_str=True)
    groups: dict[str, type[OptionGroup]] = {}
    options = [inspect.Parameter(_CONTEXT, inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)]
    for name, parameter in signature.parameters.items():
        kind = parameter.annotation
        if isinstance(kind, type) and issubclass(kind, OptionGroup):
            groups[name] = kind
            options += _options_of(kind, parameter.default)
        else:
            options.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))

    @functools.wraps(command)
    def run(**values: Any) -> None:
        context: typer.Context = values.pop(_CONTEXT)
        for name, kind in groups.items():
            taken = {option: values.pop(option) for option in _names(kind)}
            sources = {option: context.get_parameter_source(option) for option in taken}
            given = {option for option, source in sources.items() if source and source.name == "COMMANDLINE"}
            values[name] = kind(**taken, given=frozenset(given))
        command(**values)

    run.__signature__ = signature.replace(parameters=options)  # type: ignore[attr-defined]
    run.__annotations__ = {option.name: option.annotation for option in options}
    return run


def _names(group: type[OptionGroup]) -> list[str]:
    return [field.name for field in fields(group) if field.name != "given"]


def _options_of(group: type[OptionGroup], default: Any) -> list[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    usual = group() if default is inspect.Parameter.empty else default
    return [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=getattr(usual, name), annotation=hints[name])
        for name in _names(group)
    ]


#: What a preset decides.
DECIDED = ("method", "budget", "codec")


@dataclass(frozen=True, kw_only=True)
class CacheChoice(OptionGroup):
    """How the KV cache of a command is kept."""

    method: Annotated[
        str | None,
        optional(
            help="What is kept: see 'millpond methods'. Default: every entry, in 8 bits (--preset light); with a "
            "budget or an option, h2o."
        ),
    ] = None
    budget: Annotated[
        str | None,
        optional(
            help="'20%' of the prompt, 512 tokens per KV head, '64MiB' in all, or 'auto' with --max-kl. "
            f"Default: {DEFAULT}; full takes none."
        ),
    ] = None
    option: Annotated[
        list[str] | None,
        optional("--option", "-o", metavar="NAME=VALUE", help="Option of the method: see 'millpond methods NAME'."),
    ] = None
    codec: CodecName = "auto"
    preset: Annotated[str | None, optional(help="light, balanced or tiny: method, budget and codec in one word.")] = (
        None
    )
    calibration: CalibrationFile = None
    max_kl: Annotated[
        float | None, optional(help="With --budget auto: what predictions may differ from the full cache's, in nats.")
    ] = None
    fit: Annotated[
        str | None, optional(help="With --budget auto: a file of 'millpond fit'. Default: where that command puts it.")
    ] = None

    @property
    def options(self) -> dict[str, str]:
        """Options of the method.

        Raises:
            OptionError: see `parse_options`.
        """
        return parse_options(self.option or [])

    def kept(self) -> dict[str, Any]:
        """Method, budget and codec: those of the preset, or as given where there is none.

        Raises:
            OptionError: no such preset, or one together with an option that it decides.
        """
        if self.preset is None:
            return {name: getattr(self, name) for name in DECIDED}
        for name in DECIDED:
            if name in self.given:
                raise OptionError(f"--preset {self.preset} decides the {name} too; leave out --{name} or --preset")
        if self.max_kl is not None or self.fit is not None:
            raise OptionError(
                f"--preset {self.preset} decides the budget too; leave out --max-kl and --fit, or --preset"
            )
        return {"budget": None, **preset_of(self.preset)}

    def for_compress(self) -> dict[str, Any]:
        """Arguments of `compress`.

        Raises:
            OptionError: see `kept` and `parse_options`.
        """
        bound = {"max_kl": self.max_kl, "fit": self.fit}
        kept = self.kept()
        if self.preset is not None:
            kept = {"preset": self.preset}
        return {**kept, **bound, "calibration": self.calibration, **self.options}

    def for_request(self) -> dict[str, Any]:
        """What the user chose, as an engine or a request takes it; nothing where their own defaults hold.

        Raises:
            OptionError: see `kept` and `parse_options`.
        """
        kept = self.kept()
        chosen = {name: value for name, value in kept.items() if name in self.given}
        if self.preset is not None:
            chosen = {"preset": self.preset}
        bound = {"max_kl": self.max_kl, "fit": self.fit}
        given = {**chosen, **bound, "options": self.options}
        return {name: value for name, value in given.items() if value is not None and value != {}}


@dataclass(frozen=True, kw_only=True)
class ModelOptions(OptionGroup):
    """The model of a command."""

    model: ModelName = "pond-recall"
    dtype: DtypeName = "auto"
    device: DeviceName = None
    trust_remote_code: TrustRemoteCode = False

    def load(self) -> tuple[Any, PreTrainedTokenizerBase]:
        """The model on its device, and its tokenizer.

        Raises:
            OptionError: the model cannot be loaded, or the device cannot be used.
        """
        return load_on(self.model, self.dtype, self.device, self.trust_remote_code)


def load_on(
    model: str, dtype: str, device: str | None, trust_remote_code: bool = False
) -> tuple[Any, PreTrainedTokenizerBase]:
    """A model on a device, and its tokenizer.

    Raises:
        OptionError: the model cannot be loaded, or the device cannot be used.
    """
    from millpond.models.load import load_model, load_tokenizer

    where = pick_device(device)
    tokenizer = load_tokenizer(model, trust_remote_code=trust_remote_code)
    loaded: Any = load_model(model, dtype, trust_remote_code=trust_remote_code)
    return loaded.to(where), tokenizer


def device_of_engine(name: str | None, *on_cpu: object) -> str | None:
    """The device of an engine's model: the one of that name; without a name a GPU if there is one, but not where one of
    the settings `on_cpu` is given, which are for a CPU.

    Raises:
        OptionError: torch knows no such device, or cannot use it here.
    """
    if name is None and any(setting is not None for setting in on_cpu):
        return None
    found = pick_device(name)
    return None if found.type == "cpu" else str(found)


def pick_device(name: str | None) -> torch.device:
    """The device of that name; without a name, a GPU if there is one.

    Raises:
        OptionError: torch knows no such device, or cannot use it here.
    """
    import torch

    from millpond.models.device import usable_device

    return usable_device(name or ("cuda" if torch.cuda.is_available() else "cpu"), f"--device {name}")


@dataclass(frozen=True, kw_only=True)
class PromptSource(OptionGroup):
    """A prompt on the command line, in a file, or on standard input."""

    prompt: Annotated[str | None, optional(help="The prompt.")] = None
    prompt_file: Annotated[str | None, optional(help="Read the prompt from this file; - is standard input.")] = None

    def read(self) -> str:
        """The prompt from one of its two sources.

        Raises:
            OptionError: neither or both are given, the file cannot be read, or the prompt is empty.
        """
        if (self.prompt is None) == (self.prompt_file is None):
            raise OptionError("give the prompt either as --prompt TEXT or as --prompt-file FILE (- for standard input)")
        text = self.prompt if self.prompt_file is None else _text_of(self.prompt_file)
        if text is None or not text.strip():
            raise OptionError("the prompt is empty")
        return text


def _text_of(file: str) -> str:
    if file == "-":
        return sys.stdin.read()
    try:
        return Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"prompt file {file!r} cannot be read: {error}") from error


def wants_template(tokenizer: PreTrainedTokenizerBase, chat: bool | None) -> bool:
    """Whether to apply the chat template: as `chat` says; None: if there is one.

    Raises:
        OptionError: `chat` is True and there is no template.
    """
    from millpond.models.chat_template import has_template

    found = has_template(tokenizer)
    if chat and not found:
        raise OptionError("--chat: this tokenizer has no chat template; leave --chat out")
    return found and chat is not False


def encode(tokenizer: PreTrainedTokenizerBase, text: str, chat: bool | None) -> Tensor:
    """(1, n) token ids, through the chat template if wanted, or if there is one.

    Raises:
        OptionError: a chat template is wanted and there is none.
    """
    from millpond.models.untrusted.render import write_chat

    if wants_template(tokenizer, chat):
        messages = [{"role": "user", "content": text}]
        said = write_chat(tokenizer, messages, add_generation_prompt=True)
        inputs = tokenizer(said, add_special_tokens=False, return_tensors="pt")
    else:
        inputs = tokenizer(text, return_tensors="pt")
    ids: Tensor = inputs["input_ids"]
    return ids
