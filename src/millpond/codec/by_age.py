"""Number formats by age, such as "bf16:20%,int8:20%,int4": old entries are stored in fewer bits.

The newest 20 % of the entries that a head holds stay in bf16, the next 20 % are int8, the rest int4. An entry becomes
int4 by way of int8, whose rounding it keeps. Whole pages of codes pass, so that a tier may hold up to a page more.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

from millpond.codec.presets import PRESETS, codec_named
from millpond.codec.spec import WHOLE, Codec, is_plain
from millpond.errors import OptionError, unknown

#: Separates a tier from its size.
SIZE = ":"
#: The tier of numbers as they are, which may only be the first.
PLAIN = "bf16"
#: Most entries that a tier may be given by number: those of the longest text.
MAX_ENTRIES = 2**30
#: Most tiers: none of the formats has room for more between 16 and 2 bits.
MAX_TIERS = 6
#: The head_dim at which the bits of two formats are compared.
DIM = 128
WAY_OUT = "write 'bf16:20%,int8:20%,int4' or 'bf16:128,int8:256,int4', the newest tier first"
#: What a format may not be in a tier: it belongs to a prompt, a model or a score, which a later format cannot undo.
REFUSED = ("tiered", "prune", "balanced", "rotated", "pre_rope", "calibrated")


@dataclass(frozen=True, slots=True)
class SizedFormat:
    """Format of one age, as it is written, and how many entries it holds.

    One of `share` and `entries` is 0.

    Attributes:
        share: Share of the entries of a head, in hundredths of a percent.
        entries: Number of entries.
    """

    name: str
    share: int = 0
    entries: int = 0


def parse_ages(text: str) -> Codec:
    """Return the codec of a text with ":" in it; a semicolon separates like a comma.

    Raises:
        OptionError: an unknown format, one that has no place in a tier, a size that cannot be read, shares that leave
            nothing for the last tier, or a tier with more bits than the one before it.

    Example:
        >>> [(tier.name, tier.share) for tier in parse_ages("bf16:20%,int8:20%,int4").ages]
        [('int8', 2000), ('int4', 4000)]
    """
    if text.count(",") + text.count(";") >= MAX_TIERS:
        raise OptionError(f"codec={text[:80]!r} names more than {MAX_TIERS} tiers; {WAY_OUT}")
    words = [word.strip() for word in text.replace(";", ",").split(",")]
    sized, last = [_sized(word, text) for word in words[:-1]], words[-1]
    if SIZE in last or not sized:
        raise OptionError(
            f"codec={text!r}: the last tier takes what the others leave, and {last!r} is not the name of a format "
            f"alone; {WAY_OUT}"
        )
    if sum(tier.share for tier in sized) >= WHOLE:
        shares = sum(tier.share for tier in sized) / 100
        raise OptionError(f"codec={text!r}: its shares add up to {shares:g} %, which leaves nothing for {last!r}")
    share = entries = 0
    ages: list[Codec] = []
    for number, tier in enumerate([*sized, SizedFormat(last)]):
        if number or tier.name != PLAIN:
            ages.append(replace(_format(tier.name, text), share=share, residual=entries))
        share, entries = share + tier.share, entries + tier.entries
    _check_order(ages, text)
    name = ",".join([*(f"{tier.name}{SIZE}{_size(tier)}" for tier in sized), last])
    return replace(ages[0], name=name, ages=tuple(ages))


def _sized(word: str, text: str) -> SizedFormat:
    name, colon, size = (part.strip() for part in word.partition(SIZE))
    if not colon:
        raise OptionError(f"codec={text!r}: tier {word!r} has no size, and only the last one needs none; {WAY_OUT}")
    number = size.removesuffix("%").strip()
    integer, point, part = number.partition(".")
    if not (integer.isdecimal() and number.isascii() and len(integer) <= 10) or (point and not part.isdecimal()):
        raise OptionError(f"codec={text[:80]!r}: {size[:20]!r} is no number of entries, as '128', or share, as '20%'")
    if size.endswith("%"):
        if len(part) > 2 or not 0 < round(float(number) * 100) < WHOLE:
            raise OptionError(f"codec={text!r}: a share is above 0 % and below 100 %, to two digits, not {size!r}")
        return SizedFormat(name, share=round(float(number) * 100))
    if point or not 0 < int(integer) <= MAX_ENTRIES:
        raise OptionError(f"codec={text!r}: a tier holds 1 to {MAX_ENTRIES} entries, a whole number, not {size!r}")
    return SizedFormat(name, entries=int(integer))


def _size(tier: SizedFormat) -> str:
    return f"{tier.share / 100:g}%" if tier.share else str(tier.entries)


def _format(name: str, text: str) -> Codec:
    """Return the format of a tier of codes."""
    if name == PLAIN:
        raise OptionError(f"codec={text!r}: '{PLAIN}' may only be the first tier: entries lose bits as they grow old")
    names = tuple(name.split("+"))
    if len(names) > 2:
        raise OptionError(
            f"codec={text!r}: {name!r} names {len(names)} formats; give one, or one for keys and one more"
        )
    for part in names:
        if part not in PRESETS:
            raise unknown("codec", part, [PLAIN, *PRESETS])
    codec = codec_named(names[0] if len(names) == 1 else (names[0], names[1]))
    for feature in REFUSED:
        if getattr(codec, feature):
            raise OptionError(
                f"codec={text!r}: {name!r} is {feature}, which a tier by age cannot be; use int8, int4 or kivi2"
            )
    if is_plain(codec):
        raise OptionError(f"codec={text!r}: {name!r} stores numbers as they are; as the first tier write '{PLAIN}'")
    return codec


def _check_order(ages: list[Codec], text: str) -> None:
    """Check that each age has fewer bits than those before it.

    Raises:
        OptionError: a tier whose entries have as many bits as those before it, or more.
    """
    bits = [tier.bits_per_element(DIM, DIM) for tier in ages]
    for (before, more), (then, fewer) in pairwise(zip(ages, bits, strict=True)):
        if fewer >= more:
            raise OptionError(
                f"codec={text!r}: tier {then.name!r} has {fewer:.1f} bits a number and {before.name!r} before it "
                f"{more:.1f}; entries lose bits as they grow old, so name the tiers from many bits to few"
            )
