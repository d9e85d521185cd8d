"""GET /: the page, from the package's own files; POST /page/markdown: an answer as the page shows it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.resources import files

from fastapi import APIRouter
from starlette.responses import Response

from millpond.server.body_parsing import ParsedRoute
from millpond.server.markdown import render_markdown
from millpond.server.schemas import MarkdownBody

#: Path -> file of `page/` and its kind.
_FILES = {
    "/": ("page.html", "text/html; charset=utf-8"),
    "/page/style.css": ("style.css", "text/css; charset=utf-8"),
    "/page/code.css": ("code.css", "text/css; charset=utf-8"),
} | {
    f"/page/{name}.js": (f"{name}.js", "text/javascript; charset=utf-8")
    for name in ("answer", "chat", "clipboard", "conversation", "held", "highlight", "main", "memory", "reading")
}
PATHS = frozenset(_FILES)
#: The page sends requests to this server only, and cannot be framed by another page.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)


def routes(needs_key: bool) -> APIRouter:
    """Return the routes of the page.

    Args:
        needs_key: The server asks for an API key; the page then asks for it before anything else.
    """
    router = APIRouter(include_in_schema=False, route_class=ParsedRoute)
    thread = ThreadPoolExecutor(1, "markdown")  # one for all: it is work for a processor
    for path, (name, kind) in _FILES.items():
        router.add_api_route(path, _sender(name, kind, needs_key), methods=["GET"], response_class=Response)

    @router.post("/page/markdown")
    async def markdown(body: MarkdownBody) -> dict[str, str]:
        return {"html": await asyncio.get_running_loop().run_in_executor(thread, render_markdown, body.text)}

    return router


def _sender(name: str, kind: str, needs_key: bool) -> Callable[[], Awaitable[Response]]:
    body = files("millpond.server").joinpath("page", name).read_bytes()
    if needs_key:
        body = body.replace(b'data-needs-key="false"', b'data-needs-key="true"')

    async def send() -> Response:
        headers = {
            "Content-Type": kind,
            "Content-Security-Policy": _POLICY,
            "Cache-Control": "no-cache",
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
        }
        return Response(body, headers=headers)

    return send
