"""POST /v1/completions."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter
from fastapi import Request as HttpRequest
from starlette.responses import Response

from millpond.engine.chunks.prompt import Prompt
from millpond.prompt_marks import PromptMarks
from millpond.server.answers import ChoicesCall, CompletionVoice
from millpond.server.body_parsing import ParsedRoute
from millpond.server.errors import ApiError
from millpond.server.fill_in import FillIn, needed
from millpond.server.prompt_marks import IN_COMPLETION, completion_marks, marks_prompt, refuse_marks, with_chunks
from millpond.server.request_mapping import check_room, most_tokens, requests, sampling, wants_progress
from millpond.server.schemas import CompletionBody
from millpond.server.service import Service

#: OpenAI's default.
_MAX_TOKENS = 16


def routes(service: Service) -> APIRouter:
    """The route that continues texts."""
    router = APIRouter(route_class=ParsedRoute)

    @router.post("/v1/completions", response_model=None)
    async def complete(body: CompletionBody, http: HttpRequest) -> Response:
        """Continue texts or token ids; with `echo` and `logprobs`, score them."""
        return await service.answer(http, await job_of(service, body))

    return router


async def job_of(service: Service, body: CompletionBody) -> ChoicesCall:
    """What a body asks for, checked.

    Raises:
        ApiError, OptionError: it cannot be.
    """
    service.check_model(body.model)
    service.tokens.check_fields(body)
    refuse_marks(body.millpond, IN_COMPLETION)
    if body.best_of is not None and body.best_of != (body.n or 1):
        message = f"best_of={body.best_of}: exactly n={body.n or 1} answers are made, and none is thrown away"
        raise ApiError(400, message, "unsupported_parameter", "best_of")
    limit = service.settings.max_tokens
    default = _MAX_TOKENS if limit is None else min(_MAX_TOKENS, limit)
    asked = most_tokens(default if body.max_tokens is None else body.max_tokens, limit)
    prompts, texts = await _prompts(service, body.prompt)
    read: Sequence[tuple[int, ...] | Prompt] = prompts
    if body.millpond.chunks:
        read = [await _chunked(service, body, prompts, texts, body.millpond.chunks)]
    more: dict[str, Any] = {}
    if body.suffix:
        fill, read = await _filled(service, body, prompts, texts, body.suffix)
        more = {"stop": fill.stops, "stop_token_ids": (*(body.stop_token_ids or ()), *fill.stop_ids)}
    marks = await _marks(service, body, prompts, texts)
    check_room(read, asked, service.llm.text_limit)
    # nothing new is wanted with max_tokens=0: the engine writes one token, which stays here
    params = sampling(
        body,
        max_tokens=max(asked or 0, 1),
        logprobs=body.logprobs,
        prompt_logprobs=body.logprobs if body.echo else None,
        **more,
    )
    voice = CompletionVoice(
        params.n,
        body.logprobs is not None,
        bool(asked),
        await _echo(service, prompts, texts) if body.echo else (),
        token_ids=not service.tokens.exists,
    )
    name = f"cmpl-{uuid.uuid4().hex}"
    made = requests(
        name,
        read,
        params,
        body.millpond,
        body.cache_salt,
        service.settings.timeout_s,
        marks=marks,
        tell_read=wants_progress(body),
    )
    include_usage = body.stream_options is not None and body.stream_options.include_usage
    return ChoicesCall(name, made, voice, bool(body.stream), include_usage)


async def _filled(
    service: Service, body: CompletionBody, prompts: list[tuple[int, ...]], texts: list[str | None], suffix: str
) -> tuple[FillIn, list[tuple[int, ...]]]:
    """What ends texts before `suffix`, and prompts that ask for them.

    Raises:
        ApiError: the model has no tokens for it; or an echo, or spans of the prompt, which is another one then.
    """
    fill = needed(service.tokens.fill_in, "suffix")
    if body.echo or marks_prompt(body.millpond):
        message = "suffix makes another prompt, so it goes without echo and without spans of the prompt (millpond)"
        raise ApiError(400, message, "invalid_value", "suffix")
    behind = await service.tokens.encode(suffix, special=False)
    before = [
        ids if text is None else await service.tokens.encode(text, special=False) if text else ()
        for ids, text in zip(prompts, texts, strict=True)
    ]
    return fill, [fill.prompt(one, behind) for one in before]


async def _marks(
    service: Service, body: CompletionBody, prompts: list[tuple[int, ...]], texts: list[str | None]
) -> PromptMarks:
    """What a body marks of its only prompt, in tokens.

    Raises:
        ApiError, OptionError: see `completion_marks`.
    """
    shared, prefixes = not (body.echo and body.logprobs is not None), service.llm.stats().prefix is not None
    requested = completion_marks(body.millpond, prompts, texts, shared=shared, prefixes=prefixes)
    if requested is None:
        return PromptMarks()
    return requested.marks if texts[0] is None else await service.tokens.in_text(texts[0], prompts[0], requested)


async def _chunked(
    service: Service,
    body: CompletionBody,
    prompts: list[tuple[int, ...]],
    texts: list[str | None],
    spans: list[tuple[int, int]],
) -> Prompt:
    """The only prompt of a body, with its chunks.

    Raises:
        ApiError: several prompts, or one that is repeated in the answer; or bad spans.
    """
    if len(prompts) != 1 or body.echo:
        message = "millpond.chunks goes with one prompt that is not echoed; send a request for each"
        raise ApiError(400, message, "invalid_value", "millpond.chunks")
    return await service.tokens.chunked(with_chunks(prompts[0] if texts[0] is None else texts[0], spans))


async def _prompts(
    service: Service, prompt: str | list[int] | list[str] | list[list[int]]
) -> tuple[list[tuple[int, ...]], list[str | None]]:
    """Ids of every prompt, and its text where it came as one."""
    if isinstance(prompt, str):
        return [await service.tokens.encode(prompt)], [prompt]
    if all(isinstance(part, int) for part in prompt):  # an empty list too: one prompt without a token
        prompt = [[part for part in prompt if isinstance(part, int)]]
    service.gate.check_number(len(prompt))
    prompts: list[tuple[int, ...]] = []
    texts: list[str | None] = []
    for part in prompt:
        if isinstance(part, str):
            prompts.append(await service.tokens.encode(part))
            texts.append(part)
        elif isinstance(part, list):
            service.tokens.check(part, "prompt")
            prompts.append(tuple(part))
            texts.append(None)
    return prompts, texts


async def _echo(service: Service, prompts: list[tuple[int, ...]], texts: list[str | None]) -> list[tuple[str, str]]:
    if not service.tokens.exists:
        return [("", f"token_id:{prompt[0]}") for prompt in prompts]
    firsts = await service.tokens.texts([prompt[0] for prompt in prompts])
    whole = [
        await service.tokens.decode(ids) if text is None else text for ids, text in zip(prompts, texts, strict=True)
    ]
    return list(zip(whole, firsts, strict=True))
