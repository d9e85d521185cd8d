"""Rotary positions of a model's heads, from the table that its own module holds."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from millpond import UnsupportedModelError

#: Turns heads x (n, H, D) to positions (n,), as the model's own module does.
Turn = Callable[[Tensor, Tensor], Tensor]
#: Largest difference to the model's own module, by the bytes of a number.
_TOLERANCE = {2: 0.05, 4: 1e-4, 8: 1e-4}


class HeadRotation:
    """Rotation of heads to positions and back.

    Args:
        table: (positions, n): cosines, then sines, of n / 2 angles.
        halves: Number i of a head turns with number i + n / 2; else numbers 2 i and 2 i + 1 together.
    """

    def __init__(self, table: Tensor, *, halves: bool) -> None:
        self._table = table
        self._halves = halves

    @classmethod
    def probe(cls, table: Tensor, dim: int, turn: Turn, name: str, *, halves: bool) -> HeadRotation:
        """Return the rotation of heads of `dim` numbers, if it is what the model's own module does.

        Raises:
            UnsupportedModelError: the module does something else.
        """
        fits = table.ndim == 2 and table.shape[1] % 2 == 0 and table.shape[1] <= dim and table.is_floating_point()
        if fits:
            rotation = cls(table, halves=halves)
            gen = torch.Generator().manual_seed(0)
            at = torch.tensor([0, 1, 2, len(table) // 2, len(table) - 1], device=table.device)
            x = torch.randn(len(at), 1, dim, generator=gen).to(table.device, table.dtype)
            found, wanted = rotation.rotate(x.transpose(0, 1)[None], at[None])[0].transpose(0, 1), turn(x, at).float()
            if found.shape == wanted.shape and (found - wanted).abs().max() <= _TOLERANCE[table.itemsize]:
                return rotation
        raise UnsupportedModelError(
            f"millpond: the method needs queries as they are before RoPE, and {name} turns them by more than one "
            "rotation for each position; use snapkv"
        )

    def rotate(self, x: Tensor, positions: Tensor, inverse: bool = False) -> Tensor:
        """Rotate x (B, H, n, D) to (or back from) positions (B, n), in float32 or wider."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        cos, sin = self._angles(positions, wide.dtype)
        if inverse:  # a scaled rotation (YaRN) has cos^2 + sin^2 = a^2: its inverse is the transpose over a^2
            norm = cos**2 + sin**2
            cos, sin = cos / norm, -sin / norm
        cos, sin = cos[:, None], sin[:, None]
        n = 2 * cos.shape[-1]
        head, rest = wide[..., :n], wide[..., n:]
        if self._halves:
            left, right = head.chunk(2, -1)
            return torch.cat([left * cos - right * sin, right * cos + left * sin, rest], -1)
        left, right = head[..., ::2], head[..., 1::2]
        turned = torch.stack([left * cos - right * sin, right * cos + left * sin], -1)
        return torch.cat([turned.flatten(-2), rest], -1)

    def _angles(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return cosines and sines (B, n, angles); behind the end of the table by turning again from its last row."""
        last = len(self._table) - 1
        cos, sin = self._table[positions.clamp(max=last)].to(dtype).chunk(2, -1)
        beyond = (positions - last).clamp(min=0)
        while bool(beyond.any()):
            more_cos, more_sin = self._table[beyond.clamp(max=last)].to(dtype).chunk(2, -1)
            scale = (more_cos**2 + more_sin**2).sqrt()  # once is enough of a scaled rotation
            is_beyond = (beyond > 0)[..., None]
            turned_cos = (cos * more_cos - sin * more_sin) / scale
            turned_sin = (sin * more_cos + cos * more_sin) / scale
            cos, sin = torch.where(is_beyond, turned_cos, cos), torch.where(is_beyond, turned_sin, sin)
            beyond = (beyond - last).clamp(min=0)
        return cos, sin
