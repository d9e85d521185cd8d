"""Colours of methods, the same in every picture, and one colour scale for amounts."""

from __future__ import annotations

import math
import zlib

INK, FAINT, GRID, PAPER = "#1c2b36", "#5d6b76", "#dfe5ea", "#ffffff"
#: Text on a coloured ground: one of the two reads on any step of the scale.
DEEP, BRIGHT = "#060d12", "#ffffff"

#: Colours that the eight most common kinds of colour vision tell apart (Okabe and Ito, 2008), by what they stand for:
#: baselines are grey, the reference is ink, methods are coloured.
METHODS = {
    "full": INK,
    "oracle": "#8a6d00",
    "h2o": "#0072b2",
    "ada": "#009e73",
    "snapkv": "#d55e00",
    "tova": "#cc79a7",
    "streaming": "#56b4e9",
    "no_heavy": "#e69f00",
    "window": "#7f8a94",
    "random": "#b3bcc4",
}
_OTHERS = ("#0072b2", "#009e73", "#d55e00", "#cc79a7", "#56b4e9", "#e69f00")
MARKERS = ("o", "s", "D", "^", "v", "P", "X")


def colour_of(method: str) -> str:
    """Return the colour of a method, options or not; the same in every picture.

    Example:
        >>> colour_of("h2o") == colour_of("h2o:recent=0.1")
        True
    """
    name = method.partition(":")[0]
    return METHODS.get(name) or _OTHERS[zlib.crc32(name.encode()) % len(_OTHERS)]


def marker_of(method: str, peer: str = "millpond") -> str:
    """Return the marker of a line: round for a method with a colour of its own."""
    name, _, variant = method.partition(":")
    variant += "" if peer == "millpond" else peer
    if name in METHODS and not variant:
        return MARKERS[0]
    return MARKERS[1 + zlib.crc32((variant or name)[::-1].encode()) % (len(MARKERS) - 1)]


def water(n: int, dark: bool = False) -> list[str]:
    """Return `n` colours from little to much, in even steps of lightness.

    Even steps show the order without a legend. On a light page little is pale and much is deep; on a dark page little
    is deep and much is bright.
    """
    shares = [i / max(n - 1, 1) for i in range(n)]
    if dark:
        return [
            _oklch(0.29 + 0.55 * t, 0.035 + 0.065 * math.sin(math.pi * (0.2 + 0.6 * t)), 245 - 55 * t) for t in shares
        ]
    return [_oklch(0.955 - 0.565 * t, 0.022 + 0.085 * t, 205 + 50 * t) for t in shares]


def text_on(colour: str) -> str:
    """Return dark or bright, whichever reads better on `colour`."""
    return max((DEEP, BRIGHT), key=lambda ink: contrast(ink, colour))


def contrast(one: str, other: str) -> float:
    """Return the contrast ratio of two colours as WCAG 2 defines it, 1 to 21.

    Example:
        >>> round(contrast("#000000", "#ffffff"), 6)
        21.0
    """
    bright, dim = sorted((luminance(one), luminance(other)), reverse=True)
    return (bright + 0.05) / (dim + 0.05)


def luminance(colour: str) -> float:
    """Return the relative luminance of "#rrggbb", 0 to 1."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def _oklch(lightness: float, chroma: float, hue: float) -> str:
    """Return a colour of Ottosson's Oklab as "#rrggbb".

    The coordinates are cylindrical: lightness, chroma, hue in degrees.
    """
    a, b = chroma * math.cos(math.radians(hue)), chroma * math.sin(math.radians(hue))
    long = (lightness + 0.3963377774 * a + 0.2158037573 * b) ** 3
    medium = (lightness - 0.1055613458 * a - 0.0638541728 * b) ** 3
    short = (lightness - 0.0894841775 * a - 1.2914855480 * b) ** 3
    linear = (
        4.0767416621 * long - 3.3077115913 * medium + 0.2309699292 * short,
        -1.2684380046 * long + 2.6097574011 * medium - 0.3413193965 * short,
        -0.0041960863 * long - 0.7034186147 * medium + 1.7076147010 * short,
    )
    return "#" + "".join(f"{_encoded(c):02x}" for c in linear)


def _encoded(linear: float) -> int:
    c = min(max(linear, 0.0), 1.0)
    return round(255 * (12.92 * c if c <= 0.0031308 else 1.055 * c ** (1 / 2.4) - 0.055))
