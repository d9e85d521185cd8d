"""Bodies that are made to take long, at the size that is admitted and far beyond it."""

from __future__ import annotations

from collections.abc import Callable

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
#: Of `ServerSettings`, which would take attackers seconds to import.
MOST_ITEMS = 2**17
VALUES, NESTS = MOST_ITEMS - 20, MOST_ITEMS // 16 - 10
SAID = '{"role": "user", "content": "x"}'


def of(name: str, value: str) -> str:
    return f'{{"{name}": {value}}}'


def many(value: str, number: int) -> str:
    """An array of so many."""
    return f"[{(value + ',') * (number - 1)}{value}]"


def unknown(number: int) -> str:
    return '{"prompt": "x", ' + ", ".join(f'"k{place}": 1' for place in range(number)) + "}"


#: Path, what makes the body, and the status of the answer of a model with a small context.
BODIES: dict[str, tuple[str, Callable[[], str], int]] = {
    "lists of lists": (TEXT, lambda: of("prompt", many("[5]", 3_700_000)), 413),
    "lists that are admitted": (TEXT, lambda: of("prompt", many("[5]", NESTS)), 400),
    "numbers that are admitted": (TEXT, lambda: of("prompt", many("5", VALUES)), 400),
    "bad numbers": (TEXT, lambda: of("prompt", many("5.5", VALUES)), 400),
    "unknown keys": (TEXT, lambda: unknown(1_000_000), 413),
    "unknown keys that are admitted": (TEXT, lambda: unknown(16_000), 400),
    "messages": (CHAT, lambda: of("messages", many(SAID, 390_000)), 413),
    "messages that are admitted": (CHAT, lambda: of("messages", many(SAID, NESTS)), 400),
    "empty messages": (CHAT, lambda: of("messages", many("{}", NESTS)), 400),
    "empty parts": (CHAT, lambda: of("messages", '[{"role": "user", "content": ' + many("{}", NESTS - 5) + "}]"), 400),
    "brackets": (CHAT, lambda: "[" * 16_000_000, 413),
    "deep brackets": (CHAT, lambda: '{"messages": ' + "[" * 8_000, 400),
    "quotes": (TEXT, lambda: of("prompt", many('""', 5_000_000)), 413),
    "escaped quotes": (TEXT, lambda: of("prompt", '"' + '\\"' * 7_000_000 + '"'), 413),
    "escapes that are admitted": (TEXT, lambda: of("prompt", '"' + "\\u00e9" * 1_000_000 + '"'), 400),
    "a long text": (TEXT, lambda: of("prompt", '"' + "a," * 8_000_000 + '"'), 400),
    "a long name": (TEXT, lambda: of("k" * 16_000_000, "1"), 400),
    "a long number": (TEXT, lambda: '{"prompt": "x", "seed": ' + "9" * 16_000_000 + "}", 400),
    "a long model": (TEXT, lambda: '{"prompt": "x", "model": "' + "m" * 16_000_000 + '"}', 404),
    "white space": (TEXT, lambda: '{"prompt": "w5", "max_tokens": 2' + " " * 16_000_000 + "}", 200),
}
