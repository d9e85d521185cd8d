"""Arguments of the kernels of the codec `transform`: how numbers are coded, and how they become those of tokens."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

#: Tokens of a page, and bytes before its planes.
TOKENS, HEADER_BYTES = 32, 16
#: Most bits of a number, and the numbers of a set of tables, 2 + 4 + ... + 128.
MOST_BITS = 7
SET_LEVELS = (2 << MOST_BITS) - 2


class CodedDimensions(NamedTuple):
    """Codes of a layer's keys or values: a number is scale * level + shift.

    Attributes:
        shift: (rows,) float32.
        scale: (rows,) float32.
        bits: (rows,) uint8, 0 to 7.
        levels: Sets of the tables of 1, 2, ... 7 bits, (sets, 254) float32, each table ascending.
        sets: Which set a dimension has, (rows,) int32; None: all have the first.
    """

    shift: Tensor
    scale: Tensor
    bits: Tensor
    levels: Tensor
    sets: Tensor | None = None


class BackTransform(NamedTuple):
    """Tokens of coded numbers z: x = mean + sum over i of z[i] * matrix[i].

    Attributes:
        coded: How they are coded; a dimension without bits is its shift.
        mean: (d,) float32.
        matrix: (rows, d) float32, contiguous.
    """

    coded: CodedDimensions
    mean: Tensor
    matrix: Tensor


#: Those of a layer's keys and values.
BackTransforms = tuple[BackTransform, BackTransform]
