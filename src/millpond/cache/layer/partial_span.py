"""Protocol of a run of a prompt's tokens of which only some are computed, and the others come from a chunk store."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from millpond.kernels.args import AttentionShape


class PartialSpan(Protocol):
    """The next `length` tokens of one sequence."""

    @property
    def length(self) -> int:
        """Tokens of the run."""
        ...

    @property
    def rows(self) -> Tensor:
        """(R,) int64 on the host, ascending: which of them are computed."""
        ...

    def complete(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Keys (Hkv, length, key_dim) and values (Hkv, length, value_dim) of all tokens, keys after RoPE.

        k, v: (Hkv, R, dim), those of the computed tokens.
        """
        ...

    def observe(self, layer: int, q: Tensor, keys: Tensor, positions: Tensor, shape: AttentionShape) -> None:
        """See the attention of a layer: queries q (Hq, R, key_dim) over keys (Hkv, N, key_dim) at positions (Hkv, N).

        They come as they are stored: rotated by a Hadamard matrix where the codec does so.
        """
        ...
