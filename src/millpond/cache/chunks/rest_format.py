"""Number formats of stored chunks: those of the model, or codes of 8 or 4 bits with a scale and a zero per group.

Keys share a scale along 32 neighbouring tokens of one channel, because a few of their channels are large throughout;
values along 32 neighbouring channels of one token, or all of them where 32 does not divide their number (KIVI,
arXiv:2402.02750). Both are coded before RoPE.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from millpond.errors import unknown
from millpond.kernels.packed.groups import Groups, decode_affine, encode_affine

#: Formats by name; "auto": that of the model.
RestName = Literal["auto", "float32", "bf16", "int8", "int4"]
#: Numbers that share a scale.
GROUP = 32
_FLOATS = {"float32": torch.float32, "bf16": torch.bfloat16}
_BITS = {"int8": 8, "int4": 4}

#: Suffix of a tensor's name, its shape and its dtype.
Part = tuple[str, tuple[int, ...], torch.dtype]


def check_rest(name: str) -> RestName:
    """The name of a format.

    Raises:
        OptionError: there is no such format.
    """
    for known in get_args(RestName):
        if name == known:
            return known  # type: ignore[no-any-return]
    raise unknown("dtype of a chunk store", str(name), get_args(RestName))


@dataclass(frozen=True, slots=True)
class RestFormat:
    """How keys (Hkv, n, key_dim) and values (Hkv, n, value_dim) of one layer are kept.

    Attributes:
        name: see `RestName`. model: dtype of the model's own keys and values.
    """

    name: RestName
    model: torch.dtype

    @property
    def bits(self) -> int | None:
        """Of a code; None: numbers are kept as floats."""
        return _BITS.get(self.name)

    @property
    def dtype(self) -> torch.dtype:
        """Of the numbers, where they are no codes."""
        return _FLOATS.get(self.name, self.model)

    @property
    def exact(self) -> bool:
        """Whether what is kept is what was given, bit for bit."""
        return self.bits is None and torch.promote_types(self.dtype, self.model) == self.dtype

    def parts(self, heads: int, n: int, dim: int, is_key: bool) -> list[Part]:
        """The tensors that keep keys or values (heads, n, dim)."""
        if self.bits is None:
            return [("", (heads, n, dim), self.dtype)]
        runs = (heads, -(-n // GROUP), dim) if is_key else (heads, n, dim // _group(dim))
        codes = (heads, n, dim if self.bits == 8 else -(-dim // 2))
        return [("", codes, torch.uint8), (".scales", runs, torch.float16), (".zeros", runs, torch.float16)]

    def nbytes(self, heads: int, n: int, dim: int, is_key: bool) -> int:
        """Bytes of these tensors."""
        return sum(torch.Size(shape).numel() * dtype.itemsize for _, shape, dtype in self.parts(heads, n, dim, is_key))

    def encode(self, x: Tensor, is_key: bool) -> dict[str, Tensor]:
        """Keys or values x (heads, n, dim), n > 0, as tensors on the CPU by the suffixes of `parts`.

        Raises:
            NumericsError: NaN, infinity, or a number that no scale can hold.
        """
        if self.bits is None:
            return {"": x.to("cpu", self.dtype)}
        n, dim = x.shape[1:]
        groups = encode_affine(_by_channel(x) if is_key else x.reshape(*x.shape[:2], -1, _group(dim)), self.bits)
        codes = (groups.codes.transpose(2, 3).flatten(1, 2)[:, :n] if is_key else groups.codes.flatten(2)).byte()
        if self.bits == 4:
            codes = torch.nn.functional.pad(codes, (0, dim % 2))
            codes = codes[..., ::2] | codes[..., 1::2] << 4
        assert groups.zeros is not None, "not symmetric"
        return {"": codes.cpu(), ".scales": groups.scales.cpu(), ".zeros": groups.zeros.cpu()}

    def decode(self, parts: dict[str, Tensor], dim: int, is_key: bool) -> Tensor:
        """The numbers (heads, n, dim) that these tensors stand for: float32, or floats as they are kept."""
        codes = parts[""]
        if self.bits is None:
            return codes
        if self.bits == 4:
            codes = torch.stack([codes & 15, codes >> 4], -1).flatten(2)[..., :dim]
        n = codes.shape[1]
        grouped = _by_channel(codes) if is_key else codes.reshape(*codes.shape[:2], -1, _group(dim))
        found = decode_affine(Groups(grouped, parts[".scales"], parts[".zeros"]), self.bits)
        return found.transpose(2, 3).flatten(1, 2)[:, :n] if is_key else found.flatten(2)


def _group(dim: int) -> int:
    return GROUP if dim % GROUP == 0 else dim


def _by_channel(x: Tensor) -> Tensor:
    """X (heads, n, dim) as (heads, runs, dim, GROUP); the last run is filled up with its last token, which widens no
    range."""
    missing = -x.shape[1] % GROUP
    if missing:
        x = torch.cat([x, x[:, -1:].expand(-1, missing, -1)], 1)
    return x.reshape(len(x), -1, GROUP, x.shape[2]).transpose(2, 3)
