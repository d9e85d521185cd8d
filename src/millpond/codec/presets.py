"""Number formats by name."""

from __future__ import annotations

from millpond.codec.gaussian import TABLE3
from millpond.codec.groups import E4M3, ROWS, TABLES, integers
from millpond.codec.spec import Codec, joined
from millpond.errors import unknown
from millpond.kernels.packed.layout import Side

#: Slots per group of keys, and so per page, where the paper names none.
GROUP = 64
KIVI, FLEXGEN, KVQUANT, MIKV = "arXiv:2402.02750", "arXiv:2303.06865", "arXiv:2401.18079", "arXiv:2402.18096"
THINK, QUAROT = "arXiv:2407.21018", "arXiv:2404.00456"


def _plain(bits: int) -> Codec:
    return Codec(f"int{bits}", integers(bits, GROUP, by_channel=True), integers(bits), GROUP, residual=GROUP)


def _kivi(bits: int) -> Codec:
    # keys per channel, values per token, groups of 32, the newest 128 as they are
    return Codec(f"kivi{bits}", integers(bits, 32, by_channel=True), integers(bits, 32), residual=128, paper=KIVI)


def _kvquant(bits: int) -> Codec:
    return Codec(
        f"kvquant{bits}", Side(TABLES[bits], by_channel=True, fixed=True), Side(TABLES[bits]), sinks=1, pre_rope=True,
        calibrated=True, key_outliers=0.01, value_outliers=0.01, paper=KVQUANT,
    )  # fmt: skip


def _rotated(bits: int) -> Codec:
    return Codec(f"rotated{bits}", integers(bits), integers(bits), rotated=True, paper=QUAROT)


_ALL = [
    Codec("bf16", ROWS, ROWS),
    *(_plain(bits) for bits in (8, 4, 3, 2)),
    Codec("fp8", E4M3, E4M3, residual=32),
    Codec("flexgen4", integers(4, 64), integers(4, 64), paper=FLEXGEN),
    *(_kivi(bits) for bits in (2, 4)),
    *(_kvquant(bits) for bits in (2, 3, 4)),
    Codec("mikv", integers(2), integers(2), balanced=True, tiered=True, paper=MIKV),
    Codec("think", ROWS, ROWS, residual=32, prune=0.4, paper=THINK),
    Codec("think_kivi2", integers(2, 32, by_channel=True), integers(2, 32), residual=128, prune=0.4, paper=THINK),
    *(_rotated(bits) for bits in (4, 2)),
    Codec("rotated3", TABLE3, TABLE3, rotated=True, paper=QUAROT),
]
PRESETS = {codec.name: codec for codec in _ALL}


def codec_named(name: str | tuple[str, str]) -> Codec:
    """The codec of that name, or of a pair (keys, values).

    Raises:
        OptionError: no such codec, or a pair that cannot share a page.
    """
    if isinstance(name, tuple):
        return joined(*(codec_named(part) for part in name))
    if name not in PRESETS:
        raise unknown("codec", name, PRESETS)
    return PRESETS[name]
