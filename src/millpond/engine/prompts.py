"""Prompts as users give them, and the requests that are made of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from millpond.engine.chunks.prompt import Prompt
from millpond.engine.request import CacheOptions, Request
from millpond.engine.sampling.params import SamplingParams
from millpond.errors import OptionError
from millpond.prompt_marks import PromptMarks

T = TypeVar("T")

#: What `LLM.generate` takes: a text, token ids, a mapping with one of them, or a `Prompt` of texts and chunks; or
#: several.
Prompts = (
    str
    | Sequence[int]
    | Prompt
    | Mapping[str, Any]
    | Sequence[str]
    | Sequence[Sequence[int]]
    | Sequence[Prompt]
    | Sequence[Mapping[str, Any]]
)
#: Keys of a prompt that is a mapping: its text, or its token ids.
TEXT, IDS = "prompt", "prompt_token_ids"
_SHAPES = (
    "a prompt is a text, a list of token ids, {'prompt': text}, {'prompt_token_ids': ids} or a Prompt; several are a "
    "list of them"
)


def requests_of(
    prompts: Prompts,
    params: SamplingParams | Sequence[SamplingParams] | None,
    cache: CacheOptions | None,
    names: Iterator[int],
    marks: PromptMarks | Sequence[PromptMarks] | None = None,
) -> list[Request]:
    """A request for each prompt, named by the next numbers.

    Raises:
        OptionError: something that is no prompt, or another number of params or marks.
    """
    each = prompts_of(prompts)
    chosen = _for_each(SamplingParams() if params is None else params, SamplingParams, "params", len(each))
    marked = _for_each(PromptMarks() if marks is None else marks, PromptMarks, "marks", len(each))
    return [
        Request(request_id=str(next(names)), prompt=prompt, params=own, cache=cache or CacheOptions(), marks=its_marks)
        for prompt, own, its_marks in zip(each, chosen, marked, strict=True)
    ]


def prompts_of(given: Prompts) -> list[str | tuple[int, ...] | Prompt]:
    """Each prompt of what a user gave.

    Raises:
        OptionError: it is none; the message names the shapes.
    """
    if isinstance(given, str | Prompt | Mapping):
        return [_prompt(given)]
    several = _listed(given)
    if several and all(map(_is_id, several)):
        return [tuple(several)]
    return [_prompt(one) for one in several]


def _listed(given: Any) -> list[Any]:
    """What a list, an array of numpy or a tensor holds, numbers as Python's own."""
    if hasattr(given, "tolist"):
        found = given.tolist()
        return found if isinstance(found, list) else [found]
    if not isinstance(given, Iterable):
        raise OptionError(f"{_short(given)} is no prompt: {_SHAPES}")
    return list(given)


def _prompt(given: Any) -> str | tuple[int, ...] | Prompt:
    """One prompt."""
    if isinstance(given, str | Prompt):
        return given
    if isinstance(given, Mapping):
        return _of_mapping(given)
    ids = _listed(given)
    if all(map(_is_id, ids)):
        return tuple(ids)
    raise OptionError(f"{_short(given)} is no prompt: {_SHAPES}")


def _of_mapping(given: Mapping[str, Any]) -> str | tuple[int, ...]:
    if "role" in given:
        raise OptionError(f"{_short(given)} is a message of a chat, and no prompt: call LLM.chat with the messages")
    text, ids = given.get(TEXT), given.get(IDS)
    if set(given) == {TEXT} and isinstance(text, str):
        return text
    if set(given) == {IDS} and not isinstance(ids, str) and all(map(_is_id, own := _listed(ids))):
        return tuple(own)
    raise OptionError(f"{_short(given)} is no prompt: a mapping has {TEXT!r}, a text, or {IDS!r}, a list of ids alone")


def _is_id(one: object) -> bool:
    return isinstance(one, int) and not isinstance(one, bool)


def _short(given: object) -> str:
    shown = repr(given)
    return shown if len(shown) <= 80 else f"{shown[:77]}..."


def _for_each(given: T | Sequence[T], kind: type[T], name: str, n: int) -> list[T]:
    """What is given for each of `n` prompts.

    Raises:
        OptionError: neither one for all nor one for each.
    """
    if isinstance(given, kind):
        return [given] * n
    several: list[Any] = list(given) if isinstance(given, Sequence) else [given]
    if not all(isinstance(one, kind) for one in several):
        raise OptionError(f"{name}={_short(given)}: give a {kind.__name__}, or a list with one for each prompt")
    if len(several) != n:
        raise OptionError(f"{len(several)} {name} for {n} prompts: give one, or one for each")
    return several
