"""`millpond chat`: a conversation in the terminal, with a model here or behind an OpenAI-compatible address."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Annotated, Any

import typer
from rich.markup import escape

from millpond.cli.chat_backend import ChatBackend, LocalBackend, Message, reach
from millpond.cli.console import errors, notes
from millpond.cli.options import (
    BudgetText,
    CalibrationFile,
    MethodOptions,
    PresetName,
    kept_as,
    optional,
    parse_options,
)
from millpond.errors import MillpondError, OptionError

HELP = {
    "/reset": "forget the conversation; a system message stays",
    "/stats": "how long the last answer took, and what its cache held",
    "/help": "this list",
    "/quit": "leave; so does the end of the input (Ctrl-D)",
}


def chat(
    context: typer.Context,
    url: Annotated[str | None, optional(help="Of a server, with or without /v1. Default: the model runs here.")] = None,
    model: Annotated[
        str | None, optional(help="A folder, a hub id, a bundled model. Default: pond-recall, or the server's first.")
    ] = None,
    system: Annotated[str | None, optional(help="A system message before everything.")] = None,
    method: Annotated[str | None, optional(help="What is kept: see 'millpond methods'. Default: h2o.")] = None,
    budget: BudgetText = None,
    option: MethodOptions = None,
    codec: Annotated[str | None, optional(help="How entries are stored: see 'millpond codecs'.")] = None,
    preset: PresetName = None,
    calibration: CalibrationFile = None,
    kv_memory: Annotated[str | None, optional(help="Most memory for the cache ('2GiB'). Default: no limit.")] = None,
    dtype: Annotated[str | None, optional(help="f32, bf16 or f16. Default: as the weights were saved.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most new tokens of an answer.")] = 512,
    temperature: Annotated[float, typer.Option(min=0, help="0 takes the most likely token.")] = 0.7,
    top_p: Annotated[float, typer.Option(help="Draw from the most likely tokens of this total probability.")] = 1.0,
    typical_p: Annotated[
        float, typer.Option(help="Draw from the tokens of this total probability whose surprise is the usual one.")
    ] = 1.0,
    seed: Annotated[int | None, optional(help="Of the draws. Default: another one each time.")] = None,
    key_variable: Annotated[
        str, typer.Option(help="Of the environment; the key in it is sent to the server.")
    ] = "OPENAI_API_KEY",
) -> None:  # fmt: skip
    """Talk to a model. /help lists what can be said beside questions; Ctrl-C stops an answer."""
    drawn: dict[str, Any] = {"max_tokens": max_tokens, "temperature": temperature, "top_p": top_p}
    drawn |= {"seed": seed} if seed is not None else {}
    drawn |= {"typical_p": typical_p} if typical_p != 1 else {}  # which not every server knows
    kept = {**kept_as(context, preset, method, budget, codec), "options": parse_options(option or [])}
    kept = {name: value for name, value in kept.items() if value}
    if url is None:
        own = {**kept, **({"calibration": calibration} if calibration else {})}
        who: AbstractContextManager[ChatBackend] = _here(model or "pond-recall", kv_memory, dtype, own, drawn)
    elif kv_memory or dtype or calibration:
        raise OptionError("--kv-memory, --dtype and --calibration are the server's; leave them out with --url")
    else:
        who = reach(url, model, os.environ.get(key_variable), {**drawn, **({"millpond": kept} if kept else {})})
    with notes(), who as partner:
        _note(f"{partner.name}; /help lists what can be said beside questions")
        converse(partner, typed(), system)


def converse(partner: ChatBackend, said: Iterator[str], system: str | None = None) -> None:
    """Answer line after line until there are no more; an error costs the turn in which it comes, and no more."""
    beginning: list[Message] = [{"role": "system", "content": system}] if system else []
    messages = list(beginning)
    for line in said:
        match line.strip():
            case "":
                continue
            case "/quit":
                return
            case "/reset":
                messages = list(beginning)
                _note("forgotten")
            case "/stats":
                _note(partner.last())
            case "/help":
                _note("\n".join(f"{command:8} {what}" for command, what in HELP.items()))
            case other if other.startswith("/"):
                _note(f"{other} is unknown; /help lists what there is")
            case text:
                messages.append({"role": "user", "content": text})
                answer = _answer(partner, messages, sys.stdout.write)
                if answer is None:
                    messages.pop()
                else:
                    messages.append({"role": "assistant", "content": answer})


def typed() -> Iterator[str]:
    """The lines of the standard input; Ctrl-C begins the line anew."""
    prompt = ""
    if sys.stdin.isatty():
        import readline  # noqa: F401  # input() then knows arrow keys and what was typed before

        prompt = "> "
    while True:
        try:
            yield input(prompt)
        except EOFError:
            return
        except KeyboardInterrupt:
            sys.stdout.write("\n")


def _answer(partner: ChatBackend, messages: list[Message], write: Callable[[str], object]) -> str | None:
    """The answer, written while it comes; Ctrl-C ends it with what came. None: there was none."""
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
def _here(
    model: str, kv_memory: str | None, dtype: str | None, kept: dict[str, Any], drawn: dict[str, Any]
) -> Iterator[LocalBackend]:
    from millpond.engine.llm import LLM
    from millpond.engine.sampling.params import SamplingParams

    params = SamplingParams(**drawn)
    with errors().status(f"loading {model}"):
        llm = LLM(model, kv_memory=kv_memory, dtype=dtype, **kept)
    with llm:
        yield LocalBackend(llm, params, model)


def _note(text: str) -> None:
    errors().print(f"[dim]{escape(text)}[/]", soft_wrap=True, highlight=False)
