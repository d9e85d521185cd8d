"""Options that commands share, each written once: of the cache, the model, the prompt, and `-o name=value`."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, get_type_hints

import typer

from millpond.cli.setting_options import option_of, parameter_of, usual_of, value_of
from millpond.engine.settings import EngineSettings, LoadSettings
from millpond.errors import OptionError
from millpond.option_pairs import parse_options
from millpond.presets import preset as preset_of

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase


#: A `typer.Option` whose default, None, needs no showing.
optional = partial(typer.Option, show_default=False)

ModelName = Annotated[str, typer.Option(help="A name of `millpond models`, a folder, a GGUF file, or a hub id.")]
CodecName = Annotated[str, option_of(EngineSettings, "codec", show_default=True)]
CalibrationFile = Annotated[str | None, option_of(EngineSettings, "calibration")]
DtypeName = Annotated[str, option_of(LoadSettings, "dtype", default_text="", show_default=True)]
NewTokens = Annotated[int, typer.Option("--max-new-tokens", "--max-tokens", min=1, help="New tokens, at most.")]
ChunkDtype = Annotated[
    str,
    typer.Option(
        help="Number format of stored chunks: auto (as the model computes them), float32, bf16, int8, int4, or "
        "--storage-codec's."
    ),
]
DeviceName = Annotated[str | None, option_of(LoadSettings, "device", default_text="cuda if there is one")]
TrustRemoteCode = Annotated[bool, option_of(EngineSettings, "trust_remote_code")]
BudgetFloor = Annotated[int, option_of(EngineSettings, "budget_floor")]
Threads = Annotated[int | None, option_of(LoadSettings, "threads")]
Memory = Annotated[str | None, option_of(LoadSettings, "memory")]
DeviceMemory = Annotated[str | None, option_of(LoadSettings, "device_memory")]
Disk = Annotated[Path | None, option_of(LoadSettings, "disk")]
OverflowRule = Annotated[str, option_of(EngineSettings, "overflow")]
Weights = Annotated[str | None, option_of(EngineSettings, "weights")]
PluginFile = Annotated[
    Path | None,
    optional(help="A Python file with a method of your own (for eval also a task); it need not be installed."),
]
Temperature = Annotated[float, typer.Option(help="0 takes the most likely token.")]
TopP = Annotated[float, typer.Option(help="Sample from the most likely tokens of this total probability.")]
TypicalP = Annotated[
    float, typer.Option(help="Sample from the tokens of this total probability whose surprise is closest to average.")
]
Chat = Annotated[
    bool | None, optional("--chat/--no-chat", help="Wrap the prompt in the chat template. Default: if there is one.")
]


#: Name of the parameter through which typer passes the command's context.
_CONTEXT = "context"


@dataclass(frozen=True, kw_only=True)
class OptionGroup:
    """Base of option groups, whose fields are annotated as parameters of a command are.

    A group can also take settings of a dataclass: `kind`, and their names among those of its `order`.

    Attributes:
        given: Names of the options that the user set on the command line; no option itself.
        settings: Values of the settings by their names, as `kind` takes them; those that are missing have their
            defaults.
        kind, order: a dataclass with settings, and the names of all options of the group in the order of the help.
        usual: Defaults of settings that are others than those of `kind`.
    """

    given: frozenset[str] = frozenset()
    settings: Mapping[str, Any] = field(default_factory=dict)
    kind: ClassVar[type]
    order: ClassVar[tuple[str, ...]] = ()
    usual: ClassVar[Mapping[str, Any]] = {}

    def __post_init__(self) -> None:
        names = [name for name in type(self).order if name not in _fields(type(self))]
        full = {name: self.settings.get(name, _usual(type(self), name)) for name in names}
        object.__setattr__(self, "settings", {name: value_of(self.kind, name, full[name]) for name in full})


def expand_groups(command: Callable[..., None]) -> Callable[..., None]:
    """Return a command for typer whose `OptionGroup` parameters are replaced by their options.

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
            own = {option: taken.pop(option) for option in _fields(kind)}
            values[name] = kind(**own, settings=taken, given=frozenset(given))
        command(**values)

    run.__signature__ = signature.replace(parameters=options)  # type: ignore[attr-defined]
    run.__annotations__ = {option.name: option.annotation for option in options}
    return run


def _fields(group: type[OptionGroup]) -> dict[str, Any]:
    """Return the types of the options that are fields of the group itself."""
    hints = get_type_hints(group, include_extras=True)
    return {one.name: hints[one.name] for one in fields(group) if one.name not in ("given", "settings")}


def _names(group: type[OptionGroup]) -> dict[str, None]:
    """Return the names of all options in the order of the help."""
    return dict.fromkeys(group.order or _fields(group))


def _usual(group: type[OptionGroup], name: str) -> Any:
    """Return the default of a setting of the group."""
    return group.usual[name] if name in group.usual else usual_of(group.kind, name)


def _options_of(group: type[OptionGroup], default: Any) -> Iterator[inspect.Parameter]:
    own, usual = _fields(group), group() if default is inspect.Parameter.empty else default
    for name in _names(group):
        if name in own:
            how, value = inspect.Parameter.KEYWORD_ONLY, getattr(usual, name)
            yield inspect.Parameter(name, how, default=value, annotation=own[name])
        else:
            yield parameter_of(group.kind, name, _usual(group, name))


#: What a preset decides.
DECIDED = ("method", "budget", "codec")


@dataclass(frozen=True, kw_only=True)
class CacheChoice(OptionGroup):
    """How the KV cache of a command is kept."""

    method: Annotated[str | None, option_of(EngineSettings, "method")] = None
    budget: Annotated[str | None, option_of(EngineSettings, "budget")] = None
    option: Annotated[
        list[str] | None,
        optional("--option", "-o", metavar="NAME=VALUE", help="Option of the method: see 'millpond methods NAME'."),
    ] = None
    codec: CodecName = "auto"
    preset: Annotated[str | None, option_of(EngineSettings, "preset")] = None
    calibration: CalibrationFile = None
    max_kl: Annotated[float | None, option_of(EngineSettings, "max_kl")] = None
    fit: Annotated[str | None, option_of(EngineSettings, "fit")] = None

    @property
    def options(self) -> dict[str, str]:
        """Options of the method.

        Raises:
            OptionError: see `parse_options`.
        """
        return parse_options(self.option or [])

    def kept(self) -> dict[str, Any]:
        """Return method, budget and codec: those of the preset, or else as given.

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
        """Return arguments of `compress`.

        Raises:
            OptionError: see `kept` and `parse_options`.
        """
        bound = {"max_kl": self.max_kl, "fit": self.fit}
        kept = self.kept()
        if self.preset is not None:
            kept = {"preset": self.preset}
        return {**kept, **bound, "calibration": self.calibration, **self.options}

    def for_request(self) -> dict[str, Any]:
        """Return the user's choice as an engine or a request takes it, without defaults.

        Raises:
            OptionError: see `kept` and `parse_options`.
        """
        kept = self.kept()
        own_choice = {name: value for name, value in kept.items() if name in self.given}
        if self.preset is not None:
            own_choice = {"preset": self.preset}
        bound = {"max_kl": self.max_kl, "fit": self.fit}
        given = {**own_choice, **bound, "options": self.options}
        return {name: value for name, value in given.items() if value is not None and value != {}}


@dataclass(frozen=True, kw_only=True)
class ModelOptions(OptionGroup):
    """The model of a command."""

    model: ModelName = "pond-recall"
    dtype: DtypeName = "auto"
    device: DeviceName = None
    trust_remote_code: TrustRemoteCode = False

    def load(self) -> tuple[Any, PreTrainedTokenizerBase]:
        """Return the model on its device, and its tokenizer.

        Raises:
            OptionError: the model cannot be loaded, or the device cannot be used.
        """
        return load_on(self.model, self.dtype, self.device, self.trust_remote_code)


def load_on(
    model: str, dtype: str, device: str | None, trust_remote_code: bool = False
) -> tuple[Any, PreTrainedTokenizerBase]:
    """Return a model on a device, and its tokenizer.

    Raises:
        OptionError: the model cannot be loaded, or the device cannot be used.
    """
    from millpond.models.load import load_model, load_tokenizer

    where = pick_device(device)
    tokenizer = load_tokenizer(model, trust_remote_code=trust_remote_code)
    loaded: Any = load_model(model, dtype, trust_remote_code=trust_remote_code)
    return loaded.to(where), tokenizer


@dataclass(frozen=True, kw_only=True)
class EnginePlace(OptionGroup):
    """Memory, device and threads of an engine with its model."""

    memory: Memory = None
    disk: Disk = None
    device: DeviceName = None
    device_memory: DeviceMemory = None
    dtype: DtypeName = "auto"
    threads: Threads = None

    @property
    def chosen_dtype(self) -> str | None:
        """Data type as of `LLM`; None: as the checkpoint."""
        return None if self.dtype == "auto" else self.dtype

    def as_arguments(self, weights: str | None) -> dict[str, Any]:
        """Return arguments of `LLM`.

        Args:
            weights: Format of the engine's weights.

        Raises:
            OptionError: the device cannot be used.
        """
        return {
            **{name: getattr(self, name) for name in ("memory", "disk", "device_memory", "threads")},
            "dtype": self.chosen_dtype,
            "device": device_of_engine(self.device, self.disk, weights, self.memory),
        }


def device_of_engine(name: str | None, *on_cpu: object) -> str | None:
    """Return the device of an engine's model.

    It is the one of that name; without a name a GPU if there is one, but not where one of the settings `on_cpu` is
    given, which are for a CPU.

    Raises:
        OptionError: torch knows no such device, or cannot use it here.
    """
    if name is None and any(setting is not None for setting in on_cpu):
        return None
    device = pick_device(name)
    return None if device.type == "cpu" else str(device)


def pick_device(name: str | None) -> torch.device:
    """Return the device of that name; without a name, a GPU if there is one.

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
        """Return the prompt from one of its two sources.

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

    templated = has_template(tokenizer)
    if chat and not templated:
        raise OptionError("--chat: this tokenizer has no chat template; leave --chat out")
    return templated and chat is not False


def encode(tokenizer: PreTrainedTokenizerBase, text: str, chat: bool | None) -> Tensor:
    """Return (1, n) token ids, through the chat template if wanted, or if there is one.

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
