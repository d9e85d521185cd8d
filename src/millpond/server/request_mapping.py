"""Engine requests from the fields of a body: sampling, cache and deadline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from millpond.budget import Budget
from millpond.engine.chunks.prompt import Prompt
from millpond.engine.request import CacheOptions, Request
from millpond.engine.sampling.params import CONSTRAINTS, SamplingParams
from millpond.errors import BudgetError
from millpond.hf.fit import is_auto
from millpond.images.picture import Picture
from millpond.presets import preset
from millpond.prompt_marks import PromptMarks
from millpond.server.errors import ApiError
from millpond.server.schemas import (
    CacheFields,
    ObjectFormat,
    SamplingFields,
    SchemaFormat,
    StructuralTag,
    TextFormat,
    TokenFields,
    constraint,
    two_of,
)

#: Fields that have the same name and meaning in `SamplingParams`; null leaves its default. Then those that are lists.
_SAME = (
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "typical_p",
    "min_tokens",
    "logit_bias",
    "n",
    "seed",
    "ignore_eos",
    "skip_special_tokens",
)
_LISTS = ("stop_token_ids", "bad_words", "allowed_token_ids")


def sampling(fields: TokenFields, **more: Any) -> SamplingParams:
    """Return how tokens are chosen.

    Args:
        fields: Fields of the body.
        **more: `SamplingParams` that the kinds of answers name differently.

    Raises:
        OptionError: a value out of its range.
        ApiError: more than one field says what the answer must follow.
    """
    values: dict[str, Any] = {name: value for name in _SAME if (value := getattr(fields, name, None)) is not None}
    values |= {name: tuple(value) for name in _LISTS if (value := getattr(fields, name)) is not None}
    if (guided := constraint(fields)) is not None:
        if any(more.get(name) is not None for name in CONSTRAINTS):
            raise two_of(guided[0], "response_format or tool_choice")
        more |= guided[1]
    stop = (fields.stop,) if isinstance(fields.stop, str) else tuple(fields.stop or ())
    more["stop"] = stop + tuple(more.get("stop", ()))
    return SamplingParams(**values | more)


def cache_options(fields: CacheFields) -> CacheOptions:
    """Return how the cache is kept.

    Raises:
        OptionError: no such preset. ApiError: a preset together with an option that it sets; or what is no budget.
    """
    if fields.preset is not None:
        for name in ("method", "budget", "codec"):
            if getattr(fields, name) is not None:
                message = f"preset {fields.preset!r} decides the {name} too: give one of the two"
                raise ApiError(400, message, "invalid_value", f"millpond.{name}")
        preset(fields.preset)
    if fields.budget is not None and not is_auto(fields.budget):
        try:
            Budget.parse(fields.budget)
        except BudgetError as error:  # which is otherwise one that cannot be met
            raise ApiError(400, str(error), "invalid_value", "millpond.budget") from None
    return CacheOptions(
        method=fields.method,
        options=fields.options,
        budget=fields.budget,
        codec=fields.codec,
        recompute=fields.recompute,
        max_kl=fields.max_kl,
        preset=fields.preset,
        on_pressure=fields.on_pressure,
    )


def requests(
    name: str,
    prompts: Sequence[tuple[int, ...] | Prompt],
    params: SamplingParams,
    fields: CacheFields,
    cache_salt: str | None,
    timeout_s: float | None,
    marks: PromptMarks | None = None,
    tell_read: bool = False,
    images: tuple[Picture, ...] = (),
) -> list[Request]:
    """Return one request per prompt: the first is `name`, the others `name-1`, `name-2`, ..."""
    limits = [limit for limit in (fields.deadline_s, timeout_s) if limit is not None]
    return [
        Request(
            request_id=f"{name}-{place}" if place else name,
            prompt=prompt,
            params=params,
            cache=cache_options(fields),
            cache_salt=cache_salt,
            priority=fields.priority,
            deadline=min(limits, default=None),
            watch=fields.watch,
            marks=marks or PromptMarks(),
            tell_read=tell_read,
            images=images,
        )
        for place, prompt in enumerate(prompts)
    ]


def wants_progress(fields: SamplingFields) -> bool:
    """Whether a stream tells how far its prompts are read.

    Raises:
        ApiError: the answer is no stream.
    """
    if fields.return_progress and not fields.stream:
        message = "return_progress needs stream=true: an answer in one piece has no place to tell it"
        raise ApiError(400, message, "invalid_value", "return_progress")
    return bool(fields.return_progress)


def schema_of(wanted: TextFormat | ObjectFormat | SchemaFormat | StructuralTag | None) -> dict[str, Any] | None:
    """Return the JSON schema that an answer must follow."""
    if isinstance(wanted, SchemaFormat):
        return wanted.json_schema.schema_
    return {"type": "object"} if isinstance(wanted, ObjectFormat) else None


def most_tokens(requested: int | None, limit: int | None, param: str = "max_tokens") -> int | None:
    """Return the most new tokens; None: as many as the context holds.

    It is the request's number, or else the server's limit.

    Args:
        requested: Number of the request; None: it has none.
        limit: Limit of the server; None: there is none.
        param: Field that asks.

    Raises:
        ApiError: more than the server's limit.
    """
    if requested is not None and limit is not None and requested > limit:
        raise ApiError(400, f"{param}={requested}: this server gives at most {limit}", "invalid_value", param)
    return limit if requested is None else requested


def check_room(prompts: Sequence[tuple[int, ...] | Prompt], max_tokens: int | None, context: int) -> None:
    """Check that prompts and answers fit the context.

    Raises:
        ApiError: an empty prompt, or one that with its answer is longer than the model's context.
    """
    for prompt in prompts:
        n = prompt.n_tokens if isinstance(prompt, Prompt) else len(prompt)
        if not n:
            raise ApiError(400, "the prompt has no token", "empty_prompt", "prompt")
        if n + (max_tokens or 1) > context:
            parts = f"{n:,} tokens of prompt and {max_tokens or 1:,} new ones"
            message = f"{parts} are {n + (max_tokens or 1):,}; the model's context holds {context:,}: "
            room = f"ask for at most {context - n:,} new tokens, or "
            message += f"{room if n < context else ''}shorten the prompt"
            raise ApiError(400, message, "context_length_exceeded", "prompt")
