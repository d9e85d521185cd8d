"""`millpond chat`: a conversation in the terminal, with a model here or at an OpenAI-compatible address."""

from __future__ import annotations

import json
import os
import re
import select
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from millpond.budget import FLOOR
from millpond.cache.atomic_files import publish, write_part
from millpond.cli.chat_backend import ChatBackend, LocalBackend, Message, reach
from millpond.cli.console import errors, notes
from millpond.cli.options import (
    BudgetFloor,
    CacheChoice,
    DeviceMemory,
    DeviceName,
    Disk,
    DtypeName,
    Memory,
    OverflowRule,
    Temperature,
    TopP,
    TrustRemoteCode,
    TypicalP,
    Weights,
    device_of_engine,
    expand_groups,
    optional,
)
from millpond.errors import DataError, MillpondError, OptionError
from millpond.models.installed import OWN

HELP = {
    "/reset": "forget the conversation; a system message stays",
    "/stats": "how long the last answer took, and what its cache held",
    "/help": "this list",
    "/quit": "leave; so does the end of the input (Ctrl-D)",
}


@expand_groups
def chat(
    *,
    url: Annotated[str | None, optional(help="Address of a server. Default: the model runs here.")] = None,
    model: Annotated[
        str | None,
        optional(
            help="A name of `millpond models`, a folder, a GGUF file, or a hub id. Default: pond-recall, or the "
            "server's first."
        ),
    ] = None,
    system: Annotated[str | None, optional(help="A system message before everything.")] = None,
    session: Annotated[
        str | None, optional(metavar="NAME", help="Continue the conversation of this name; its cache is stored.")
    ] = None,
    cache: CacheChoice,
    kv_memory: Annotated[
        str | None, optional(help="Limit of the memory for the cache ('2GiB'). Default: no limit.")
    ] = None,
    memory: Memory = None,
    disk: Disk = None,
    device: DeviceName = None,
    device_memory: DeviceMemory = None,
    weights: Weights = None,
    overflow: OverflowRule = "refuse",
    dtype: DtypeName = "auto",
    trust_remote_code: TrustRemoteCode = False,
    budget_floor: BudgetFloor = FLOOR,
    max_tokens: Annotated[int, typer.Option(min=1, help="New tokens of an answer, at most.")] = 512,
    temperature: Temperature = 0.7,
    top_p: TopP = 1.0,
    typical_p: TypicalP = 1.0,
    seed: Annotated[int | None, optional(help="Seed of the sampling. Default: a new one each time.")] = None,
    key_variable: Annotated[
        str, typer.Option(help="Environment variable with the key for the server.")
    ] = "OPENAI_API_KEY",
) -> None:
    """Talk to a model. /help lists the commands; Ctrl-C stops an answer; a pasted text is one message."""
    if temperature < 0:
        raise OptionError(f"temperature={temperature} must not be negative; 0 is greedy")
    drawn: dict[str, Any] = {"max_tokens": max_tokens, "temperature": temperature, "top_p": top_p}
    drawn |= {"seed": seed} if seed is not None else {}
    drawn |= {"typical_p": typical_p} if typical_p != 1 else {}  # which not every server knows
    kept = cache.for_request()
    kept_session = None
    if session is not None:
        if url is not None:
            raise OptionError("--session stores caches of a model here; leave it out with --url")
        from millpond.models.cache_folder import cache_folder

        kept_session = ChatSession(cache_folder() / "sessions", session)
        kept_session.load(system)  # refused before the model is loaded
    if url is None:
        config = {**kept, "calibration": cache.calibration, "kv_memory": kv_memory, "weights": weights}
        config |= {"overflow": overflow, "trust_remote_code": trust_remote_code, "budget_floor": budget_floor}
        config |= {} if kept_session is None else {"cache_dir": kept_session.cache_dir}
        place = {"memory": memory, "disk": disk, "device": device_of_engine(device, disk, weights, memory)}
        place |= {"dtype": None if dtype == "auto" else dtype, "device_memory": device_memory}
        who: AbstractContextManager[ChatBackend] = _here(model or "pond-recall", config, drawn, place)
    elif any((kv_memory, memory, disk, device, device_memory, weights, cache.calibration, cache.fit)) or (
        dtype != "auto" or overflow != "refuse" or trust_remote_code
    ):
        raise OptionError(
            "--kv-memory, --memory, --disk, --device, --device-memory, --weights, --dtype, --calibration, --fit, "
            "--overflow and --trust-remote-code are the server's; leave them out with --url"
        )
    else:
        who = reach(url, model, os.environ.get(key_variable), {**drawn, **({"millpond": kept} if kept else {})})
    with notes(), who as partner:
        _note(f"{partner.name}; /help lists the commands")
        if partner.writes_names and partner.name not in OWN:
            _note(
                "this model has no chat template: it continues texts, and a message is written as 'User: ...' with "
                "'Assistant:' behind it; one that was trained for chats (-it, -instruct, -chat) answers better"
            )
        if url is None and partner.name in OWN:
            _note(f"{partner.name} is {OWN[partner.name]}; `millpond models get smollm2-135m` gets a real one")
        converse(partner, typed(), system, kept_session)


def converse(
    partner: ChatBackend, said: Iterator[str], system: str | None = None, session: ChatSession | None = None
) -> None:
    """Answer message after message until there are no more.

    An error costs the turn in which it arises, and no more.

    Args:
        partner: Source of the answers.
        said: Messages of the user.
        system: A system message before everything; None: none.
        session: Conversation whose messages come first, and which keeps those that are added.
    """
    beginning: list[Message] = [{"role": "system", "content": system}] if system else []
    messages = list(beginning) if session is None else session.load(system)
    if len(messages) > len(beginning):
        _note(f"{len(messages)} messages so far")
        beginning = [message for message in messages[:1] if message["role"] == "system"]

    def keep() -> None:
        if session is not None:
            try:
                session.save(messages)
            except MillpondError as error:
                errors().print(f"[red]{escape(str(error))}[/]", soft_wrap=True, highlight=False)

    for message in said:
        match message.strip():
            case "":
                continue
            case "/quit":
                return
            case "/reset":
                messages = list(beginning)
                keep()
                _note("forgotten")
            case "/stats":
                _note(partner.last())
            case "/help":
                _note("\n".join(f"{command:8} {what}" for command, what in HELP.items()))
            case other if other.startswith("/") and "\n" not in other:
                _note(f"{other} is unknown; /help lists the commands")
            case text:
                messages.append({"role": "user", "content": text})
                answer = _answer(partner, messages, sys.stdout.write)
                if answer is None:
                    messages.pop()
                else:
                    messages.append({"role": "assistant", "content": answer})
                    if lost := partner.forgotten():
                        _note(lost)
                    keep()


def _answer(partner: ChatBackend, messages: list[Message], write: Callable[[str], object]) -> str | None:
    """Return the answer, written while it comes; Ctrl-C ends it early. None: there was none."""
    parts: list[str] = []
    stream = partner.answer(messages)
    try:
        for part in stream:
            parts.append(part)
            write(part)
            sys.stdout.flush()
    except KeyboardInterrupt:
        _note(" (stopped)")
    except MillpondError as error:
        write("\n" if parts else "")
        errors().print(f"[red]{escape(str(error))}[/]", soft_wrap=True, highlight=False)
        return None
    finally:
        stream.close()
    write("\n")
    return "".join(parts)


@contextmanager
def _here(model: str, config: dict[str, Any], drawn: dict[str, Any], place: dict[str, Any]) -> Iterator[LocalBackend]:
    from millpond.engine.config import EngineConfig
    from millpond.engine.llm import LLM
    from millpond.engine.sampling.params import SamplingParams

    params = SamplingParams(**drawn)
    with errors().status(f"loading {model}"):
        llm = LLM(model, EngineConfig(**config), **place)
    with llm:
        yield LocalBackend(llm, params, model)


def _note(text: str) -> None:
    errors().print(f"[dim]{escape(text)}[/]", soft_wrap=True, highlight=False)


_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_ROLES = ("system", "user", "assistant")


class ChatSession:
    """One named conversation.

    Args:
        home: Folder of all of them.
        name: Name of this one.

    Attributes:
        cache_dir: Folder of the caches of its turns.

    Raises:
        OptionError: no such name can be given, or its folder cannot be made.
    """

    def __init__(self, home: Path, name: str) -> None:
        if not _NAME.fullmatch(name):
            raise OptionError(
                f"session {name[:80]!r}: a name has 1 to 64 letters, digits, '.', '_' and '-', and begins with one of "
                "the first two"
            )
        self.name = name
        self._file = home / name / "messages.json"
        self.cache_dir = home / name / "cache"
        try:
            self.cache_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise OptionError(f"session {name!r} cannot be stored ({error})") from error

    def load(self, system: str | None) -> list[Message]:
        """Return its messages so far; of a new one the system message, if there is one.

        Raises:
            OptionError: it began with another system message. DataError: its file is not as it was written.
        """
        beginning: list[Message] = [{"role": "system", "content": system}] if system else []
        try:
            messages: Any = json.loads(self._file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return beginning
        except (OSError, ValueError) as error:
            raise self._broken(str(error)) from error
        if not isinstance(messages, list) or not all(map(_is_message, messages)):
            raise self._broken("it holds no messages")
        if system and messages[:1] != beginning:
            raise OptionError(
                f"session {self.name!r} began with another system message; leave --system out, or name another session"
            )
        return messages

    def save(self, messages: Sequence[Message]) -> None:
        """Keep the messages so far.

        Raises:
            DataError: they cannot be written; those of the turn before stay.
        """
        try:
            publish(write_part(self._file, json.dumps(list(messages)).encode()), self._file)
        except OSError as error:
            raise DataError(f"session {self.name!r} cannot be stored ({error})") from error

    def _broken(self, why: str) -> DataError:
        return DataError(f"{str(self._file)!r} cannot be read ({why}); remove it, or name another session")


def _is_message(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and value.keys() == {"role", "content"}
        and value["role"] in _ROLES
        and isinstance(value["content"], str)
    )


#: At the end of a line: the message goes on in the next one.
GOES_ON = "\\"
#: Seconds in which the next line of a paste comes, where the terminal does not mark what is pasted.
PASTE_S = 0.05


def typed() -> Iterator[str]:
    r"""Yield the messages of the standard input; Ctrl-C begins a message again.

    A line is a message. At a terminal lines that are pasted are one message together, and Alt-Enter begins a new line;
    everywhere a line that ends in `\` goes on in the next one.
    """
    at_terminal = sys.stdin.isatty()
    if at_terminal:
        _edit_lines()
    while True:
        try:
            yield _message(at_terminal)
        except EOFError:
            return
        except KeyboardInterrupt:
            sys.stdout.write("\n")


def _message(at_terminal: bool) -> str:
    """Return the next message.

    Raises:
        EOFError: there is none any more.
    """
    lines: list[str] = []
    while True:
        try:
            line = input("" if not at_terminal else ". " if lines else "> ")
        except EOFError:
            if not lines:
                raise
            return "\n".join(lines)
        if at_terminal and _more_there():
            lines.append(line)
        elif line.endswith(GOES_ON):
            lines.append(line.removesuffix(GOES_ON))
        else:
            return "\n".join([*lines, line])


def _more_there() -> bool:
    """Whether the next line has arrived already, as the lines of a paste have."""
    return bool(select.select([sys.stdin], [], [], PASTE_S)[0])


def _edit_lines() -> None:
    """Let input() know arrow keys, earlier messages, and what the terminal marks as pasted."""
    import readline

    if "libedit" not in (readline.__doc__ or ""):  # which knows neither; there pasted lines are there together
        readline.parse_and_bind("set enable-bracketed-paste on")
        readline.parse_and_bind(r'"\e\C-m": "\C-v\C-j"')
