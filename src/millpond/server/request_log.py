"""A line per request in the log `millpond.requests`: route, status, tokens and speed, and nothing of what was said."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from millpond.engine.outputs import RequestOutput
from millpond.server.errors import FAILED
from millpond.server.usage import usage

#: The logger; who wants the lines sets its level to INFO.
LOG = logging.getLogger("millpond.requests")
#: Where in a scope the outputs of a request are that have ended.
FINISHED = "millpond.finished"
#: Routes that are polled; only their errors are logged.
_POLLED = frozenset({"/health", "/metrics", "/v1/millpond/memory/{request_id}"})
_METHODS = frozenset({"GET", "POST", "DELETE", "OPTIONS", "HEAD", "PUT", "PATCH"})


class RequestLog:
    """Logs each request when its answer is complete, or its client is gone. Plain ASGI."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not LOG.isEnabledFor(logging.INFO):
            await self._app(scope, receive, send)
            return
        began, status = time.monotonic(), 0
        outputs: list[RequestOutput] = []
        scope[FINISHED] = outputs

        async def noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, noting)
        except Exception:
            status = status or 500  # which is what answers it further out
            scope.setdefault(FAILED, "internal_error")
            raise
        finally:
            # the path of a route, not of the request: that may hold ids of others, or anything
            route = getattr(scope.get("route"), "path", "(no route)")
            if route not in _POLLED or not 200 <= status < 300:
                method = scope["method"] if scope["method"] in _METHODS else "(other)"
                seconds = time.monotonic() - began
                LOG.info("%s", line_of(method, route, status, outputs, seconds, scope.get(FAILED)))


def line_of(
    method: str, route: str, status: int, outputs: Sequence[RequestOutput], seconds: float, failed: str | None = None
) -> str:
    """Return one line of the log.

    Args:
        method: Method of HTTP.
        route: Path of the route.
        status: Status of HTTP; 0: the connection was lost before there was one.
        outputs: Outputs that have ended.
        seconds: Seconds of the request.
        failed: Code of the error that it ended with; None: with none.

    Example:
        >>> line_of("GET", "/v1/models", 200, [], 0.25)
        'GET /v1/models 200, 0.25 s'
        >>> line_of("POST", "/v1/completions", 429, [], 0.01, "queue_full")
        'POST /v1/completions 429 queue_full, 0.01 s'
    """
    parts = [f"{method} {route} {status or 'no answer'}{f' {failed}' if failed else ''}"]
    if outputs:
        figures = usage(outputs)
        cached = figures["prompt_tokens_details"]["cached_tokens"]
        parts.append(f"{figures['prompt_tokens']:,} prompt tokens ({cached:,} cached)")
        parts.append(f"{figures['completion_tokens']:,} generated")
        first = figures["millpond"]["first_token_s"]
        if first is not None:
            parts.append(f"first token after {first:.2f} s")
        if (rate := _rate(outputs)) is not None:
            parts.append(f"{rate:.1f} tokens/s")
    return ", ".join([*parts, f"{seconds:.2f} s"])


def _rate(outputs: Sequence[RequestOutput]) -> float | None:
    """Return tokens per second after the first of each answer; None: there are none."""
    firsts = [one.times.first_token for one in outputs if one.times.first_token is not None]
    ends = [one.times.finished for one in outputs if one.times.finished is not None]
    later = sum(max(0, len(c.token_ids) - 1) for one in outputs for c in one.completions)
    if not later or not firsts or not ends or max(ends) <= min(firsts):
        return None
    return later / (max(ends) - min(firsts))
