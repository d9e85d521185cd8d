"""GET /: the page, from the package's own files."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from importlib.resources import files

from fastapi import APIRouter
from starlette.responses import Response

#: Path -> file of `page/` and its kind.
_FILES = {
    "/": ("page.html", "text/html; charset=utf-8"),
    "/page/style.css": ("style.css", "text/css; charset=utf-8"),
    "/page/chat.js": ("chat.js", "text/javascript; charset=utf-8"),
    "/page/memory.js": ("memory.js", "text/javascript; charset=utf-8"),
    "/page/main.js": ("main.js", "text/javascript; charset=utf-8"),
}
PATHS = frozenset(_FILES)
#: The page asks nobody but this server, and nobody shows it inside another page.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)


def routes() -> APIRouter:
    """The routes of the page's files."""
    router = APIRouter(include_in_schema=False)
    for path, (name, kind) in _FILES.items():
        router.add_api_route(path, _sender(name, kind), methods=["GET"], response_class=Response)
    return router


def _sender(name: str, kind: str) -> Callable[[], Awaitable[Response]]:
    body = files("millpond.server").joinpath("page", name).read_bytes()

    async def send() -> Response:
        headers = {
            "Content-Type": kind, "Content-Security-Policy": _POLICY, "Cache-Control": "no-cache",
            "X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer",
        }  # fmt: skip
        return Response(body, headers=headers)

    return send
