"""Random streams with names: what is drawn for sample 7 does not depend on how many samples are drawn."""

from __future__ import annotations

import hashlib
import random
import string
import uuid

#: Default number of digits, as in RULER.
SEVEN = 7


def stream(*names: object) -> random.Random:
    """A random stream of its own for these names, the same on every machine.

    Example:
        >>> stream("recall", 7, 0).random() == stream("recall", 7, 0).random()
        True
        >>> stream("recall", 7, 0).random() == stream("recall", 7, 1).random()
        False
    """
    text = "\x1f".join(str(name) for name in names)
    return random.Random(int.from_bytes(hashlib.blake2b(text.encode(), digest_size=16).digest(), "big"))


def number(rng: random.Random, digits: int = SEVEN) -> str:
    """A number of exactly `digits` digits."""
    return str(rng.randrange(10 ** (digits - 1), 10**digits))


def identifier(rng: random.Random) -> str:
    """A version 4 UUID drawn from `rng`."""
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))


def letters(rng: random.Random, size: int) -> str:
    """`size` lower-case letters."""
    return "".join(rng.choices(string.ascii_lowercase, k=size))
