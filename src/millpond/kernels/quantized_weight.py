"""A matrix of weights in 4 or 8 bits: codes with scales for groups of 32 numbers of a row.

A number is step * code + least, the step and the least number of a group in float16. That is the content of the block
types Q4_1 (4 bits) and Q8_0 (8 bits, where least is 0) of GGUF files.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from millpond.errors import OptionError
from millpond.kernels.backends import load_native

#: Numbers of a row that share their scales.
GROUP = 32
#: Bits of a code, by name of the format.
FORMATS = {"int8": 8, "int4": 4}
#: Numbers that are quantized at a time: temporaries take some 20 bytes for each, and should stay in a cache.
BLOCK = 512 << 10


@dataclass(frozen=True, eq=False)
class QuantizedWeight:
    """Matrix (n, k) of codes.

    Attributes:
        codes: (n, k / 32, 16) uint8 in 4 bits, number i of a group in the low half of byte i, number 16 + i in its high
            half; (n, k / 32, 32) int8 in 8 bits.
        scales: (n, 2, k / 32) float16, steps and least numbers; (n, 1, k / 32) in 8 bits, steps alone.
        dtype: Dtype of the rows that it is multiplied with.
    """

    codes: Tensor
    scales: Tensor
    dtype: torch.dtype

    @staticmethod
    def fits(weight: Tensor) -> bool:
        """Whether a matrix can be quantized: 2-D, floating, its rows whole groups."""
        return weight.ndim == 2 and weight.is_floating_point() and weight.shape[1] % GROUP == 0 and weight.numel() > 0

    @classmethod
    def quantize(cls, weight: Tensor, bits: int) -> QuantizedWeight:
        """Return the codes nearest to weight (n, k).

        A group of equal numbers is exact as far as float16 holds the number.

        Raises:
            OptionError: rows of no whole groups, or a number that is not finite or beyond float16.
        """
        if not cls.fits(weight) or bits not in FORMATS.values():
            raise OptionError(
                f"a matrix of {tuple(weight.shape)} in {bits} bits: rows of a multiple of {GROUP} numbers take 4 or 8"
            )
        step = max(1, BLOCK // weight.shape[1])
        parts = [_quantize(weight[i : i + step].detach().float(), bits) for i in range(0, len(weight), step)]
        codes, scales = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
        return cls(codes, scales, weight.dtype)

    @staticmethod
    def parts_of(n: int, k: int, bits: int) -> tuple[tuple[tuple[int, ...], torch.dtype], tuple[int, ...]]:
        """Return shape and dtype of the codes of a matrix (n, k), and the shape of its scales."""
        groups = k // GROUP
        if bits == 4:
            return ((n, groups, GROUP // 2), torch.uint8), (n, 2, groups)
        return ((n, groups, GROUP), torch.int8), (n, 1, groups)

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return 4 if self.codes.shape[2] == GROUP // 2 else 8

    @property
    def shape(self) -> tuple[int, int]:
        """(n, k)."""
        return self.codes.shape[0], self.codes.shape[1] * GROUP

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales."""
        return self.codes.nbytes + self.scales.nbytes

    @property
    def is_cpu(self) -> bool:
        """Whether it is in the host's memory."""
        return self.codes.is_cpu

    def __len__(self) -> int:
        return self.codes.shape[0]

    def rows(self, begin: int, end: int) -> QuantizedWeight:
        """Return some of the rows, which share the memory."""
        return replace(self, codes=self.codes[begin:end], scales=self.scales[begin:end])

    def take(self, ids: Tensor) -> Tensor:
        """Return rows `ids` (N,) as numbers (N, k) in its dtype, as an embedding does."""
        return replace(self, codes=self.codes[ids], scales=self.scales[ids]).widen()

    def widen(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return all rows as numbers (n, k), each rounded once from float32.

        They are in `dtype`, or in the weight's own if that is None.
        """
        dtype = self.dtype if dtype is None else dtype
        native = load_native() if self.is_cpu else None
        if native is not None:
            widened: Tensor = native.widen(self.codes, self.scales, dtype)
            return widened
        codes, scales = self.codes, self.scales.float()[..., None]
        if self.bits == 8:
            return (codes.float() * scales[:, 0]).to(dtype).view(self.shape)
        numbers = torch.cat([codes & 15, codes >> 4], -1).float()
        return torch.addcmul(scales[:, 1], numbers, scales[:, 0]).to(dtype).view(self.shape)


#: A matrix as plain numbers, or as codes.
Weight = Tensor | QuantizedWeight


def _quantize(rows: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    grouped = rows.reshape(len(rows), -1, GROUP)
    if bits == 8:
        steps = (grouped.abs().amax(-1) / 127).half()
        scales = steps[:, None]
        lowest = torch.zeros_like(steps)
    else:
        lowest, highest = grouped.amin(-1).half(), grouped.amax(-1).half()  # torch's aminmax takes five times as long
        steps = ((highest.float() - lowest.float()) / 15).half()
        scales = torch.stack([steps, lowest], 1)
    if not bool(scales.isfinite().all()):
        raise OptionError("a matrix holds numbers not finite, or beyond float16 (65504): leave it in its dtype")
    inverse = torch.where(steps > 0, steps.float().reciprocal(), 0.0)[..., None]
    numbers = (grouped - lowest.float()[..., None]).mul_(inverse).round_()
    if bits == 8:
        return numbers.clamp_(-127, 127).to(torch.int8), scales
    codes = numbers.clamp_(0, 15).to(torch.uint8)
    return codes[..., : GROUP // 2] | codes[..., GROUP // 2 :] << 4, scales
