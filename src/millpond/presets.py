"""Settings with a name: method, budget and codec together, chosen from what was measured (docs/how-to/codecs.md)."""

from __future__ import annotations

from millpond.budget import DEFAULT
from millpond.errors import unknown

PRESETS: dict[str, dict[str, str]] = {
    "light": {"method": "full", "codec": "int8"},
    "balanced": {"method": "full", "codec": "rotated4"},
    "tiny": {"method": "ada", "budget": str(DEFAULT), "codec": "rotated4"},
}


def preset(name: str) -> dict[str, str]:
    """The method, budget and codec of a preset, for `compress` and `LLM`.

    Args:
        name: `light` (every entry in 8 bits), `balanced` (every entry in 4 bits), or `tiny` (the default budget, which
            is a fifth of a long prompt, shared among the heads as they need it, in 4 bits; chosen on a real model, see
            docs/explanation/real-recall.md).

    Raises:
        OptionError: there is none of that name.

    Example:
        >>> preset("tiny")
        {'method': 'ada', 'budget': '20%, at least 512', 'codec': 'rotated4'}
    """
    if name not in PRESETS:
        raise unknown("preset", name, PRESETS)
    return dict(PRESETS[name])
