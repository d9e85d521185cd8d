"""Number formats with grouped codes: int8, int4, int3, int2, e4m3 and tables of numbers.

A group of neighbouring numbers shares a scale, and a zero unless the format is symmetric (KIVI, arXiv:2402.02750;
FlexGen, arXiv:2303.06865). Keys are grouped along the slots of one channel, because a few of their channels are large
throughout, or along the channels of one slot; values along the channels of one slot.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from millpond.errors import OptionError
from millpond.kernels.packed import codes
from millpond.kernels.packed.codes import Fixed, Parts
from millpond.kernels.packed.layout import Format, PackedLayout, Side

INTEGERS = {2: Format.INT2, 3: Format.INT3, 4: Format.INT4, 8: Format.INT8}
TABLES = {2: Format.NUQ2, 3: Format.NUQ3, 4: Format.NUQ4}


def integers(bits: int, group: int = 0, *, by_channel: bool = False, symmetric: bool = False) -> Side:
    """Return the format of integers of `bits` bits.

    Args:
        bits: Bits of a code.
        group: Numbers per scale; 0 for all channels of a slot.
        by_channel: Group along the slots of one channel instead of the channels of one slot.
        symmetric: Store no zero: the range is centred at 0.

    Raises:
        OptionError: no format has that many bits.
    """
    if bits not in INTEGERS:
        raise OptionError(f"bits={bits}: integers have {', '.join(map(str, INTEGERS))} bits")
    return Side(INTEGERS[bits], by_channel, group, symmetric)


#: Floats of 8 bits, scaled by page so that nothing is clipped.
E4M3 = Side(Format.FP8)
#: bfloat16 as it is.
ROWS = Side(Format.ROWS)


@dataclass(frozen=True, slots=True)
class Coder:
    """Encoder and decoder of one side of a format for plain tensors: what a page would hold.

    Example:
        >>> import torch
        >>> from millpond.codec.groups import Coder, integers
        >>> keys = torch.arange(64.0).view(1, 64, 1).expand(1, 64, 32)
        >>> coder = Coder(integers(4, 32, by_channel=True))
        >>> parts = coder.encode(keys)
        >>> float((coder.decode(parts) - keys).abs().max()) <= 31 / 15 / 2
        True
        >>> coder.bits_per_element(slots=64, dim=32)
        5.0
    """

    side: Side
    fixed: Fixed | None = None

    def encode(self, x: Tensor) -> Parts:
        """Return the codes of pages of numbers x (P, slots, dim).

        Raises:
            NumericsError: NaN, infinity, or a number that no scale can hold.
            OptionError: a group that does not divide what it groups.
        """
        self._layout(x.shape[1], x.shape[2])
        return codes.encode(x, self.side, self.fixed)

    def decode(self, parts: Parts) -> Tensor:
        """Return the numbers (P, slots, dim) float32 that the codes stand for."""
        return codes.decode(parts, self.side, self.fixed)

    def bits_per_element(self, slots: int, dim: int) -> float:
        """Return the bits per number, scales, zeros and outliers included."""
        return 8 * self._layout(slots, dim).key_offsets.size / (slots * dim)

    def _layout(self, slots: int, dim: int) -> PackedLayout:
        return PackedLayout(slots, dim, dim, self.side, ROWS)
