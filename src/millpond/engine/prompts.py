"""Prompts as users give them, and the requests that are made of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from millpond.engine.chunks.prompt import Prompt
from millpond.engine.request import CacheOptions, Request
from millpond.engine.sampling.params import SamplingParams
from millpond.errors import ImageError, OptionError
from millpond.images.picture import Picture
from millpond.images.reader import ImageReader
from millpond.prompt_marks import PromptMarks

T = TypeVar("T")
PromptInput = str | tuple[int, ...] | Prompt

#: Prompts of `LLM.generate`: a text, token ids, a mapping with one of them, or a `Prompt` of texts and chunks; or
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
#: Key of its images, for a model that takes images.
IMAGES = "images"
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
    reader: ImageReader | None = None,
) -> list[Request]:
    """Return a request for each prompt, named by the next numbers.

    Args:
        prompts: The prompts.
        params: Token choice of all, or of each.
        cache: Cache options of all.
        names: Numbers of requests.
        marks: Marks of all, or of each.
        reader: Reads their images; None: there may be none.

    Raises:
        OptionError: something that is no prompt, or another number of params or marks.
        ImageError: an image that is refused, or a text without a place for it.
    """
    each = [_with_images(prompt, reader) for prompt in _each(prompts)]
    params_by_prompt = _for_each(SamplingParams() if params is None else params, SamplingParams, "params", len(each))
    marks_by_prompt = _for_each(PromptMarks() if marks is None else marks, PromptMarks, "marks", len(each))
    return [
        Request(
            request_id=str(next(names)),
            prompt=prompt,
            params=prompt_params,
            cache=cache or CacheOptions(),
            marks=prompt_marks,
            images=pictures,
        )
        for (prompt, pictures), prompt_params, prompt_marks in zip(each, params_by_prompt, marks_by_prompt, strict=True)
    ]


def prompts_of(user_prompts: Prompts) -> list[PromptInput]:
    """Return each prompt that a user gave, without its images.

    Raises:
        OptionError: it is not a prompt; the message names the accepted types.
    """
    return [_prompt(prompt) for prompt in _each(user_prompts)]


def _each(user_prompts: Prompts) -> list[Any]:
    """Return the prompts of a list, or the one that there is."""
    if isinstance(user_prompts, str | Prompt | Mapping):
        return [user_prompts]
    prompts = _listed(user_prompts)
    return [tuple(prompts)] if prompts and all(map(_is_id, prompts)) else prompts


def _with_images(user_prompt: Any, reader: ImageReader | None) -> tuple[PromptInput, tuple[Picture, ...]]:
    """Return a prompt with places for its images, and the images.

    Raises:
        ImageError: there is no reader, or see `ImageReader`.
    """
    prompt = _prompt(user_prompt)
    if not isinstance(user_prompt, Mapping) or not user_prompt.get(IMAGES):
        return prompt, ()
    images = user_prompt[IMAGES]
    if not isinstance(images, Sequence) or isinstance(images, str | bytes):
        raise ImageError(f"{IMAGES!r} of a prompt is a list of images, not {type(images).__name__}")
    if reader is None:
        raise ImageError(
            f"{len(images)} images: this model takes text alone, or was loaded without its image processor; leave "
            "them out, or give image_processor="
        )
    return reader.expand(prompt, len(images)) if isinstance(prompt, str) else prompt, reader.read_all(images)


def _listed(sequence: Any) -> list[Any]:
    """Return the elements of a list, an array of numpy or a tensor, numbers as Python's own."""
    if hasattr(sequence, "tolist"):
        elements = sequence.tolist()
        return elements if isinstance(elements, list) else [elements]
    if not isinstance(sequence, Iterable):
        raise OptionError(f"{_short(sequence)} is no prompt: {_SHAPES}")
    return list(sequence)


def _prompt(user_prompt: Any) -> PromptInput:
    """Return one prompt."""
    if isinstance(user_prompt, str | Prompt):
        return user_prompt
    if isinstance(user_prompt, Mapping):
        return _of_mapping(user_prompt)
    ids = _listed(user_prompt)
    if all(map(_is_id, ids)):
        return tuple(ids)
    raise OptionError(f"{_short(user_prompt)} is no prompt: {_SHAPES}")


def _of_mapping(mapping: Mapping[str, Any]) -> str | tuple[int, ...]:
    if "role" in mapping:
        raise OptionError(f"{_short(mapping)} is a message of a chat, and no prompt: call LLM.chat with the messages")
    text, ids, keys = mapping.get(TEXT), mapping.get(IDS), set(mapping) - {IMAGES}
    if keys == {TEXT} and isinstance(text, str):
        return text
    if keys == {IDS} and not isinstance(ids, str) and all(map(_is_id, token_ids := _listed(ids))):
        return tuple(token_ids)
    raise OptionError(
        f"{_short(mapping)} is no prompt: a mapping has {TEXT!r}, a text, or {IDS!r}, a list of ids alone, and may "
        f"have {IMAGES!r}"
    )


def _is_id(element: object) -> bool:
    return isinstance(element, int) and not isinstance(element, bool)


def _short(user_value: object) -> str:
    text = repr(user_value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _for_each(parameter: T | Sequence[T], kind: type[T], name: str, n: int) -> list[T]:
    """Return one parameter for each of `n` prompts.

    Raises:
        OptionError: neither one for all nor one for each.
    """
    if isinstance(parameter, kind):
        return [parameter] * n
    parameters: list[Any] = list(parameter) if isinstance(parameter, Sequence) else [parameter]
    if not all(isinstance(element, kind) for element in parameters):
        raise OptionError(f"{name}={_short(parameter)}: give a {kind.__name__}, or a list with one for each prompt")
    if len(parameters) != n:
        raise OptionError(f"{len(parameters)} {name} for {n} prompts: give one, or one for each")
    return parameters
