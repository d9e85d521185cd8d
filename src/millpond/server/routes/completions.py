"""POST /v1/completions."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter
from fastapi import Request as HttpRequest
from starlette.responses import Response

from millpond.cache.state.span_marks import FairShare, in_order
from millpond.engine.chunks.prompt import Prompt
from millpond.server.answers import ChoicesJob, CompletionVoice
from millpond.server.body_parsing import ParsedRoute
from millpond.server.chunk_parts import with_spans
from millpond.server.errors import ApiError
from millpond.server.fair_shares import FAIR, spans_of_prompt, with_shares
from millpond.server.fill_in import FillIn, needed
from millpond.server.forget import refuse_forget
from millpond.server.message_spans import KEEP, Span, refuse_forgotten
from millpond.server.prompt_breakpoints import prompt_breakpoints
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


async def job_of(service: Service, body: CompletionBody) -> ChoicesJob:
    """What a body asks for, checked.

    Raises:
        ApiError, OptionError: it cannot be.
    """
    service.check_model(body.model)
    service.tokens.check_fields(body)
    refuse_forgotten(body.millpond.forgotten)
    refuse_forget(body.millpond.forget)
    if body.best_of is not None and body.best_of != (body.n or 1):
        message = f"best_of={body.best_of}: exactly n={body.n or 1} answers are made, and none is thrown away"
        raise ApiError(400, message, "unsupported_parameter", "best_of")
    limit = service.settings.max_tokens
    default = _MAX_TOKENS if limit is None else min(_MAX_TOKENS, limit)
    asked = most_tokens(default if body.max_tokens is None else body.max_tokens, limit)
    prompts, texts = await _prompts(service, body.prompt)
    read: Sequence[tuple[int, ...] | Prompt] = prompts
    keep = await _kept(service, body, prompts, texts, body.millpond.keep) if body.millpond.keep else ()
    fair = await _fair(service, body, prompts, texts, spans_of_prompt(body.millpond))
    if body.millpond.chunks:
        read = [await _chunked(service, body, prompts, texts, body.millpond.chunks)]
    more: dict[str, Any] = {}
    if body.suffix:
        fill, read = await _filled(service, body, prompts, texts, body.suffix)
        more = {"stop": fill.stops, "stop_token_ids": (*(body.stop_token_ids or ()), *fill.stop_ids)}
    breakpoints: tuple[int, ...] = ()
    if body.millpond.breakpoints:
        alone = not body.millpond.chunks and not (body.echo and body.logprobs is not None)
        breakpoints = await prompt_breakpoints(service, body.millpond.breakpoints, prompts, texts, alone)
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
        keep=keep,
        breakpoints=breakpoints,
        fair_shares=fair,
        tell_read=wants_progress(body),
    )
    include_usage = body.stream_options is not None and body.stream_options.include_usage
    return ChoicesJob(name, made, voice, bool(body.stream), include_usage)


async def _filled(
    service: Service, body: CompletionBody, prompts: list[tuple[int, ...]], texts: list[str | None], suffix: str
) -> tuple[FillIn, list[tuple[int, ...]]]:
    """What ends texts before `suffix`, and prompts that ask for them.

    Raises:
        ApiError: the model has no tokens for it; or an echo, or spans of the prompt, which is another one then.
    """
    fill = needed(service.tokens.fill_in, "suffix")
    spans = body.millpond
    if body.echo or any((spans.chunks, spans.keep, spans.breakpoints, spans.fair_shares)):
        message = "suffix makes another prompt, so it goes without echo and without spans of the prompt (millpond)"
        raise ApiError(400, message, "invalid_value", "suffix")
    behind = await service.tokens.encode(suffix, special=False)
    before = [
        ids if text is None else await service.tokens.encode(text, special=False) if text else ()
        for ids, text in zip(prompts, texts, strict=True)
    ]
    return fill, [fill.prompt(one, behind) for one in before]


async def _kept(
    service: Service,
    body: CompletionBody,
    prompts: list[tuple[int, ...]],
    texts: list[str | None],
    spans: list[tuple[int, int]],
) -> tuple[Span, ...]:
    """The tokens of the only prompt of a body that stay.

    Raises:
        ApiError: several prompts, or chunks; or spans that leave the prompt.
    """
    if len(prompts) != 1 or body.millpond.chunks:
        message = "millpond.keep goes with one prompt without chunks; send a request for each"
        raise ApiError(400, message, "invalid_value", KEEP)
    if texts[0] is None:
        return tuple(spans)
    return (await service.tokens.kept_in_text(texts[0], spans))[1]


async def _fair(
    service: Service,
    body: CompletionBody,
    prompts: list[tuple[int, ...]],
    texts: list[str | None],
    shares: list[tuple[int, int, float]],
) -> tuple[FairShare, ...]:
    """The spans of the only prompt of a body that keep a share of the budget, in tokens.

    Raises:
        ApiError: several prompts, or chunks; or spans that leave the prompt. OptionError: spans that overlap.
    """
    if not shares:
        return ()
    if len(prompts) != 1 or body.millpond.chunks:
        message = f"{FAIR} goes with one prompt without chunks; send a request for each"
        raise ApiError(400, message, "invalid_value", FAIR)
    in_order(shares, "fair_shares")  # a place of two spans has no one share
    if texts[0] is None:
        return tuple(shares)
    _, found = await service.tokens.spans_in_text(texts[0], [(b, e) for b, e, _ in shares], True, FAIR)
    return with_shares(found, [share for _, _, share in shares])


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
    return await service.tokens.chunked(with_spans(prompts[0] if texts[0] is None else texts[0], spans))


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
