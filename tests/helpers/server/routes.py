"""The routes of an app, with those of the routers that it includes."""

from __future__ import annotations

from typing import Any


def all_routes(app: Any) -> set[tuple[str, str]]:
    """Path and method of each, in small letters."""
    found = set()
    for route in app.routes:
        router = getattr(route, "original_router", None)  # newer versions of FastAPI keep routers as they are
        for one in [route] if router is None else router.routes:
            found |= {(one.path.replace(":path", ""), method.lower()) for method in one.methods - {"HEAD"}}
    return found
