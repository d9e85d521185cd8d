"""KVQuant's steps one by one, at 3 and at 2 bits: KL on windows of texts, and the bytes that each step holds.

    kvquant_ladder.py smollm2-135m --text wiki=wikitext2_test.txt --calibrate wikitext2_valid.txt --out RESULTS.json

`int`: ranges of tokens, for keys and values. `channel`: ranges of keys by channel, over 32 entries. `pre_rope`: these
before RoPE. `nuq`: tables and ranges of channels by calibration in place of integers. `outliers`: 1 % of the numbers
apart. `sink`: the first entry as it is, which is the format `kvquant3` or `kvquant2`. Lacking: integers with calibrated
ranges of channels; ranges are of a page here, a bit more for each number of a key.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from setting_texts import add_rows, parser

from millpond.codec.groups import integers
from millpond.codec.presets import PRESETS
from millpond.codec.spec import Codec

STEPS = ("int", "channel", "pre_rope", "nuq", "outliers", "sink")
#: What `calibrate` is given for the steps that take a calibration; outliers and sinks of a format are those of its own.
CALIBRATED: dict[str, dict[str, Any]] = {
    "nuq": {"outliers": 0.0, "sinks": 0, "bits": (2, 3)},
    "outliers": {"sinks": 0, "bits": (2, 3)},
    "sink": {"bits": (2, 3)},
}


def ladder(bits: int) -> dict[str, Codec]:
    """The formats of `STEPS` by name."""
    whole = PRESETS[f"kvquant{bits}"]
    tokens = Codec("", integers(bits), integers(bits))
    channels = replace(tokens, key=integers(bits, 32, by_channel=True))
    formats = (tokens, channels, replace(channels, pre_rope=True), whole, whole, whole)
    return {name: replace(one, name=name) for name, one in zip(names(bits), formats, strict=True)}


def names(bits: int) -> list[str]:
    """Of the formats of `STEPS`."""
    return [f"kvquant{bits}_{step}" for step in STEPS]


def calibrated(bits: int) -> dict[str, dict[str, Any]]:
    """`CALIBRATED` by setting."""
    return {f"full/kvquant{bits}_{step}": given for step, given in CALIBRATED.items()}


def main() -> None:
    args = parser(__doc__).parse_args()
    PRESETS.update(ladder(3) | ladder(2))
    settings = [f"full/{name}" for bits in (3, 2) for name in names(bits)]
    add_rows(args, settings, calibrated(3) | calibrated(2))


if __name__ == "__main__":
    main()
