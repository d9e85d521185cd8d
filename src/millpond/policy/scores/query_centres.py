"""Centres of a model's queries before RoPE, per layer and query head, and the bands in which RoPE turns them."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from millpond.errors import CacheMismatchError, DataError
from millpond.policy.scores.query_moments import Rotate, mean_rotation

#: Format of files, and the most bytes of a header.
FORMAT, MAX_HEADER_BYTES = "millpond query centres 1", 2**16
_PARTS = ("magnitude", "mean")


@dataclass(frozen=True, slots=True, eq=False)
class QueryCentres:
    """Mean query and mean magnitude of each (layer, query head), before RoPE.

    Attributes:
        mean: (layers, Hq, D) float32, E q.
        magnitude: (layers, Hq, D) float32, E |q_f| of the band f that a channel belongs to.
    """

    mean: Tensor
    magnitude: Tensor

    def of(self, layer: int, n_heads: int, dim: int) -> tuple[Tensor, Tensor]:
        """Return mean and magnitude of one layer, (Hq, D) each.

        Raises:
            CacheMismatchError: they are those of another model.
        """
        n_layers, *shape = self.mean.shape
        if layer >= n_layers or shape != [n_heads, dim]:
            raise CacheMismatchError(
                f"layer {layer} has queries of {n_heads} heads x {dim} numbers; the centres are of {n_layers} layers "
                f"with {shape[0]} x {shape[1]}: measure them on this model (millpond calibrate --codec triattention)"
            )
        return self.mean[layer], self.magnitude[layer]

    def content(self) -> bytes:
        """Return the bytes of a safetensors file."""
        tensors = {"mean": self.mean.float().contiguous(), "magnitude": self.magnitude.float().contiguous()}
        return save(tensors, {"format": FORMAT})


def centres_of(content: bytes, name: str) -> QueryCentres:
    """Return the centres in the bytes of a file called `name`.

    Its header is checked before anything is allocated.

    Raises:
        DataError: torn, foreign, or with shapes or numbers that no measurement gives.
    """
    shapes = _shapes(content, name)
    if len(set(shapes.values())) != 1 or len(shapes["mean"]) != 3 or not all(shapes["mean"]):
        raise DataError(f"{name!r} is broken: mean and magnitude must both be (layers, heads, channels); {_AGAIN}")
    try:
        tensors = load(content)
    except SafetensorError as error:
        raise DataError(f"{name!r} is broken: {error}; {_AGAIN}") from None
    mean, magnitude = tensors["mean"], tensors["magnitude"]
    if not bool(mean.isfinite().all() and magnitude.isfinite().all() and (magnitude >= 0).all()):
        raise DataError(f"{name!r} is broken: means must be finite and magnitudes 0 or more; {_AGAIN}")
    return QueryCentres(mean, magnitude)


_AGAIN = "make it with millpond calibrate --codec triattention"


def _shapes(content: bytes, name: str) -> dict[str, tuple[int, ...]]:
    """Return the shapes in a header, which together take exactly the bytes behind it."""
    length = int.from_bytes(content[:8], "little")
    try:
        if not 0 < length <= min(MAX_HEADER_BYTES, len(content) - 8):
            raise ValueError("it has no header")
        header: dict[str, Any] = json.loads(content[8 : 8 + length])
        if header.pop("__metadata__")["format"] != FORMAT or tuple(sorted(header)) != _PARTS:
            raise ValueError("it holds other things")
        shapes = {part: tuple(int(n) for n in header[part]["shape"]) for part in _PARTS}
        numbers = sum(math.prod(shape) for shape in shapes.values())
        if any(header[part]["dtype"] != "F32" for part in _PARTS) or 4 * numbers != len(content) - 8 - length:
            raise ValueError("it is not as long as its header says")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(f"{name!r} is no file of query centres: {str(error)[:80]}; {_AGAIN}") from None
    return shapes


@dataclass(frozen=True, slots=True, eq=False)
class Bands:
    """Bands of a rotation: pairs of channels that it turns, and channels that it leaves.

    Attributes:
        partner: (D,) int64, the other channel of each band; its own of a channel that is not turned.
        scale: Factor of the rotation on lengths (YaRN has another one than 1).
    """

    partner: Tensor
    scale: float

    @classmethod
    def of(cls, rotate: Rotate | None, dim: int, device: torch.device) -> Bands:
        """Return the bands of a rotation as it turns the unit vectors to position 1."""
        turned = mean_rotation(rotate, dim, 1, 1, device)
        own = torch.arange(dim, device=device)
        across = turned.abs().fill_diagonal_(0)
        most, partner = across.max(0)
        scale = float(torch.linalg.vector_norm(turned[:, 0]))
        return cls(torch.where(most > 0, partner, own), scale)

    @property
    def share(self) -> Tensor:
        """(D,) float64: 1 over the channels of each channel's band, so that a sum over channels is one over bands."""
        alone = self.partner == torch.arange(len(self.partner), device=self.partner.device)
        return torch.where(alone, 1.0, 0.5).double()

    def magnitudes(self, x: Tensor) -> Tensor:
        """Return (..., D): the length of x (..., D) in the band of each channel."""
        squares = x.square()
        return (squares + squares[..., self.partner] * (self.share < 1).to(x.dtype)).sqrt()
