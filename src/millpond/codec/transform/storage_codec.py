"""Names of codecs for caches that wait or travel, such as `transform:1.5`."""

from __future__ import annotations

from dataclasses import dataclass

from millpond.codec.transform.allocation import LEAST_BITS, MOST_MEAN_BITS, check_bits
from millpond.errors import OptionError

_NAME = "transform"


@dataclass(frozen=True, slots=True)
class StorageCodec:
    """Codec of stored caches.

    Attributes:
        bits: Mean bits a number.
    """

    bits: float

    @property
    def name(self) -> str:
        return f"{_NAME}:{self.bits:g}"


def parse_storage_codec(text: str) -> StorageCodec:
    """Return the codec of a name.

    Raises:
        OptionError: no such codec, or bits out of range.

    Example:
        >>> parse_storage_codec("transform:1.5")
        StorageCodec(bits=1.5)
    """
    name, _, bits = text.partition(":")
    try:
        if name != _NAME:
            raise ValueError
        number = float(bits)
    except ValueError:
        raise OptionError(
            f"storage codec {text!r}: write {_NAME}:BITS with {LEAST_BITS:g} to {MOST_MEAN_BITS:g} bits a number, such "
            f"as {_NAME}:1.5"
        ) from None
    return StorageCodec(check_bits(number))
