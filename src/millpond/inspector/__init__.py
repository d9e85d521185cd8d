"""The inspector: one HTML page that shows a trace; its static files are in this folder."""

from __future__ import annotations

import base64
import html
import json
from importlib.resources import files
from typing import Any

import numpy as np

from millpond.inspector.palette import text_on, water
from millpond.inspector.trace import HeadTrace, Trace

#: Steps of the colour scale; the page's script knows the same number.
COLOURS = 12
SCRIPTS = ("trace.js", "text.js", "charts.js", "main.js")


def page(trace: Trace) -> str:
    """Return a page that needs no other file, no server and no network."""
    title = title_of(trace)
    parts = {
        "title": html.escape(f"{title} · Millpond"),
        "palette": palette_css(),
        "style": _read("style.css"),
        "script": "\n".join(map(_read, SCRIPTS)),
        "trace": json.dumps(payload(trace), ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c"),
    }
    head, *rest = _read("page.html").split("{{")
    return head + "".join(parts[name] + text for name, _, text in (part.partition("}}") for part in rest))


def title_of(trace: Trace) -> str:
    """Return the subject of the page in a few words."""
    method, budget = trace.setting.get("method", "the cache"), trace.setting.get("budget", "")
    return f"What {method} remembers" + (f" at {budget}" if budget else "")


def payload(trace: Trace) -> dict[str, Any]:
    """Return the trace as the page's script reads it: positions as bits, levels as bytes."""
    return {
        "title": title_of(trace),
        "setting": trace.setting,
        "tokens": trace.tokens,
        "special": trace.special,
        "prompt": trace.n_prompt,
        "kv": trace.kv_bytes,
        "full": trace.full_kv_bytes,
        "scoreSteps": trace.score_steps,
        "hasMerged": any(head.merged for layer in trace.heads for head in layer),
        "hasDemoted": any(head.demoted for layer in trace.heads for head in layer),
        "heads": [[_head(head, len(trace.tokens)) for head in layer] for layer in trace.heads],
    }


def _head(head: HeadTrace, n: int) -> dict[str, Any]:
    bits = np.zeros(n, np.uint8)
    bits[list(head.first)] = 1
    data: dict[str, Any] = {
        "first": _base64(np.packbits(bits, bitorder="little").tobytes()),
        "changes": [[change.evicted, change.added] for change in head.changes],
    }
    if head.levels:
        data |= {"low": head.low, "high": head.high, "levels": _base64(b"".join(head.levels))}
    if head.merged:
        data["merged"] = head.merged
    if head.demoted:
        data["demoted"] = head.demoted
    return data


def palette_css() -> str:
    """Return the colour scale as style sheet: `--c0` to `--c11`, a class each, light and dark."""
    light, dark = water(COLOURS), water(COLOURS, dark=True)
    classes = "".join(f".c{i}{{background:var(--c{i});color:var(--t{i})}}" for i in range(COLOURS))
    return f":root{{{_variables(light)}}}@media(prefers-color-scheme:dark){{:root{{{_variables(dark)}}}}}{classes}"


def _variables(colours: list[str]) -> str:
    return "".join(f"--c{i}:{colour};--t{i}:{text_on(colour)};" for i, colour in enumerate(colours))


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _read(name: str) -> str:
    return files(__name__).joinpath(name).read_text(encoding="utf-8")
