"""Number formats by name, with the table for Gaussian entries (Lloyd, 1957/1982; Max, 1960).

A name is that of the family, then the bits of a code: "int8", "kivi2", "rotated4". The family is that of the paper, or
of what is done to the numbers. `PAPER` behind it is the paper's own form, where the plain name has ours. A format of
two families joins their names: "think_kivi2". The shares of key channels, and of value channels, that are dropped
may follow the name of such a format: "think:0.5", "think:0.5:0.3".
"""

from __future__ import annotations

import re
from dataclasses import replace

from millpond.codec.groups import E4M3, ROWS, TABLES, integers
from millpond.codec.spec import Codec, joined
from millpond.errors import OptionError, unknown
from millpond.kernels.packed.layout import Format, Side

#: The eight numbers of least squared error for Gaussian numbers brought to [-1, 1] by the range of their own token, 64
#: and 128 channels in equal parts: `nuq.kmeans` on random ones (tests/codec/test_gaussian.py), made symmetric.
GAUSSIAN3 = (-0.8515625, -0.53515625, -0.30078125, -0.09765625, 0.09765625, 0.30078125, 0.53515625, 0.8515625)

#: Codes of three bits per token, a quarter less squared error there than integers of as many bits.
TABLE3 = Side(Format.NUQ3, table=GAUSSIAN3)


#: Slots per group of keys, and so per page, where the paper names none.
GROUP = 64
#: Entries that stay as they are where keys are stored less their mean: the first of a text, and the newest.
SINKS, RESIDUAL = 4, 32
#: Ends the names of formats as their papers have them, with one range for all channels of a key, biases among them.
PAPER = "_paper"
KIVI, FLEXGEN, KVQUANT, MIKV = "arXiv:2402.02750", "arXiv:2303.06865", "arXiv:2401.18079", "arXiv:2402.18096"
THINK, QUAROT = "arXiv:2407.21018", "arXiv:2404.00456"


def _plain(bits: int) -> Codec:  # "int8", "int4", "int3", "int2"
    return Codec(f"int{bits}", integers(bits, GROUP, by_channel=True), integers(bits), GROUP, residual=GROUP)


def _kivi(bits: int) -> Codec:  # "kivi2", "kivi4"
    # keys per channel, values per token, groups of 32, the newest 128 as they are
    return Codec(f"kivi{bits}", integers(bits, 32, by_channel=True), integers(bits, 32), residual=128, paper=KIVI)


def _kvquant(bits: int) -> Codec:  # "kvquant2", "kvquant3", "kvquant4"
    return Codec(
        f"kvquant{bits}",
        Side(TABLES[bits], by_channel=True, fixed=True),
        Side(TABLES[bits]),
        sinks=1,
        pre_rope=True,
        calibrated=True,
        key_outliers=0.01,
        value_outliers=0.01,
        paper=KVQUANT,
    )


def _of_tokens(codec: Codec) -> Codec:  # "kvquant2_paper", "kvquant3_paper", "kvquant4_paper"
    """Return the codec with value ranges and outliers per token over all KV heads."""
    key, value = (replace(side, across_heads=True) for side in (codec.key, codec.value))
    return replace(codec, name=f"{codec.name}{PAPER}", key=key, value=value)


def _mikv(bits: int) -> Codec:  # "mikv", "mikv3", "mikv4": the lower tier has two, three or four bits
    name = "mikv" if bits == 2 else f"mikv{bits}"
    return Codec(name, integers(bits), integers(bits), balanced=True, tiered=True, paper=MIKV)


def _above(upper: int, lower: Codec) -> Codec:  # "int8_mikv", "int8_mikv3", "int8_mikv4"
    """Return the tiers of codes of which the upper one has so many bits, per token."""
    above = Codec(f"int{upper}_above", integers(upper), integers(upper))
    return replace(above, name=f"int{upper}_{lower.name}", tiered=True, ages=(above, lower), paper=MIKV)


def _rotated(bits: int) -> Codec:  # "rotated4", "rotated2", each with `_less_mean` or `_paper`
    return Codec(f"rotated{bits}", integers(bits), integers(bits), rotated=True, paper=QUAROT)


def _less_mean(codec: Codec) -> Codec:
    """Return the codec with keys less their page's mean, and plain first and newest entries.

    Key projections with biases make channels that are large in every key: with one range for all channels of a key
    these leave no codes to the others. The first entry, to which much attention goes, is unlike the rest, and would
    move the mean of its page.
    """
    return replace(codec, key=replace(codec.key, less_mean=True), sinks=SINKS, residual=RESIDUAL)


def _paper(codec: Codec) -> Codec:  # "flexgen4_paper", "rotated4_paper", "rotated3_paper", "rotated2_paper"
    return replace(codec, name=f"{codec.name}{PAPER}")


_FLEXGEN = Codec("flexgen4", integers(4, 64), integers(4, 64), paper=FLEXGEN)
_ROTATED = (_rotated(4), _rotated(2), Codec("rotated3", TABLE3, TABLE3, rotated=True, paper=QUAROT))
_ALL = [
    Codec("bf16", ROWS, ROWS),
    *(_plain(bits) for bits in (8, 4, 3, 2)),
    Codec("fp8", E4M3, E4M3, residual=32),
    *(form(_FLEXGEN) for form in (_less_mean, _paper)),
    *(_kivi(bits) for bits in (2, 4)),
    *(_kvquant(bits) for bits in (2, 3, 4)),
    *(_of_tokens(_kvquant(bits)) for bits in (2, 3, 4)),
    *(_mikv(bits) for bits in (2, 3, 4)),
    *(_above(8, _mikv(bits)) for bits in (2, 3, 4)),
    Codec("think", ROWS, ROWS, residual=32, prune=0.4, paper=THINK),
    Codec("think_kivi2", integers(2, 32, by_channel=True), integers(2, 32), residual=128, prune=0.4, paper=THINK),
    *(form(codec) for codec in _ROTATED for form in (_less_mean, _paper)),
]
PRESETS = {codec.name: codec for codec in _ALL}
_WITH_PAPER = [name for name, codec in PRESETS.items() if codec.key.less_mean]


#: The formats whose name may be followed by ratios.
WITH_RATIO = tuple(name for name, codec in PRESETS.items() if codec.prune)
RATIO = ":"


def has_ratio(name: str) -> bool:
    """Whether it is the name of one format that drops channels, with its ratios: "think:0.5"."""
    return name.partition(RATIO)[0].strip() in WITH_RATIO and RATIO in name and not re.search("[,;=+]", name)


def _with_ratio(name: str) -> Codec:
    """Return the format of a name with the shares of channels that it drops.

    Raises:
        OptionError: a part that is not a share, or more than two shares.
    """
    family, *ratios = (part.strip() for part in name.split(RATIO))
    if len(ratios) > 2 or not all(re.fullmatch(r"0?\.[0-9]{1,3}|0", ratio) for ratio in ratios):
        raise OptionError(
            f"codec={name[:80]!r}: after {family!r} come the share of key channels that it drops, at least 0 and "
            "below 1 with at most three digits, and that of value channels if any: 'think:0.5' or 'think:0.5:0.3'"
        )
    keys, values = (float(ratio) for ratio in (*ratios, "0")[:2])
    if not keys and not values:
        raise OptionError(f"codec={name!r} drops no channel; give one of its shares above 0, as 'think:0.5'")
    text = RATIO.join([family, *(f"{ratio:g}" for ratio in ((keys, values) if values else (keys,)))])
    return replace(PRESETS[family], name=text, prune=keys, prune_values=values)


def before_means(codec: str) -> str:
    """Return today's name of a format of a file from before pages held means of keys.

    Files written then name the formats of the papers without `PAPER`: "0-1=bf16,*=rotated4" is
    "0-1=bf16,*=rotated4_paper" today.
    """
    return re.sub(rf"\b({'|'.join(_WITH_PAPER)})\b", rf"\1{PAPER}", codec)


def codec_named(name: str | tuple[str, str]) -> Codec:
    """Return the codec of that name, or of a pair (keys, values).

    Raises:
        OptionError: no such codec, or a pair that cannot share a page.
    """
    if isinstance(name, tuple):
        return joined(*(codec_named(part) for part in name))
    if has_ratio(name):
        return _with_ratio(name)
    if name not in PRESETS:
        raise unknown("codec", name, PRESETS)
    return PRESETS[name]
