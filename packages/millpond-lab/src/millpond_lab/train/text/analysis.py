"""Attention statistics of a model with the full cache: heavy hitters, the sink, sparsity.

An own pass over the attention weights of transformers' eager attention; no cache method has a part in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import PreTrainedModel

from millpond.errors import DataError

#: An entry of a row counts as nothing when it is below this share of the row's maximum.
NOTHING = 0.01
SHARES = (0.05, 0.20)
CURVE = 101  # points of the curve of gathered mass


@dataclass(frozen=True)
class AttentionStatistics:
    """Means over windows, each (n_layers, n_heads) unless said otherwise.

    Attributes:
        top: {share of columns: share of all attention that they gathered}, columns by their accumulated attention
            s_j = sum_i A_ij, the heaviest first.
        first: attention to the first token, mean over all later queries.
        sparsity: share of entries of the rows that are below `NOTHING` of the row's maximum.
        curve: (n_layers, n_heads, CURVE) gathered share of the mass over the share of columns, heaviest first.
        even: {share: what that share of columns would gather if every query looked at all tokens alike}.
    """

    top: dict[float, Tensor]
    first: Tensor
    sparsity: Tensor
    curve: Tensor
    even: dict[float, float]
    length: int
    windows: int


@torch.inference_mode()
def measure_attention(model: PreTrainedModel, windows: Sequence[Tensor]) -> AttentionStatistics:
    """Read each window (1, L) by itself and look at all its attention weights.

    The model has to be loaded with `attn_implementation="eager"`.
    """
    curves, firsts, blanks = [], [], []
    for ids in windows:
        layers = model(ids.to(model.device), output_attentions=True, use_cache=False).attentions
        weights = [layer[0].float() for layer in layers]  # (H, L, L) each
        curves.append(torch.stack([gathered(layer.sum(-2)) for layer in weights]))
        firsts.append(torch.stack([layer[:, 1:, 0].mean(-1) for layer in weights]))
        blanks.append(torch.stack([sparsity(layer) for layer in weights]))
    length = windows[0].shape[1]
    curve = torch.stack(curves).mean(0)
    even = gathered(even_columns(length)[None])[0]
    return AttentionStatistics(
        top={share: _at(curve, share) for share in SHARES},
        first=torch.stack(firsts).mean(0),
        sparsity=torch.stack(blanks).mean(0),
        curve=curve,
        even={share: float(_at(even, share)) for share in SHARES},
        length=length,
        windows=len(windows),
    )


def gathered(columns: Tensor) -> Tensor:
    """(..., CURVE) share of the mass in the heaviest 0, 1, ... 100 % of the columns (..., L)."""
    mass = columns.sort(-1, descending=True).values.cumsum(-1)
    mass = torch.cat([torch.zeros_like(mass[..., :1]), mass], -1) / mass[..., -1:]
    places = (torch.linspace(0, 1, CURVE, dtype=torch.float64) * columns.shape[-1]).round().long()
    return mass[..., places.to(mass.device)].cpu()


def sparsity(weights: Tensor) -> Tensor:
    """(H,) share of the entries that a query can see, (H, L, L) causal, below `NOTHING` of the row's maximum."""
    seen = torch.ones(weights.shape[-2:], dtype=torch.bool, device=weights.device).tril()
    small = (weights < NOTHING * weights.amax(-1, keepdim=True)) & seen
    return (small.sum((-2, -1)) / seen.sum()).cpu()


def even_columns(length: int) -> Tensor:
    """(L,) accumulated attention of every column when query i gives each of the i + 1 tokens it sees the same."""
    return (1 / torch.arange(1, length + 1, dtype=torch.float64)).flip(0).cumsum(0).flip(0)


def _at(curve: Tensor, share: float) -> Tensor:
    return curve[..., round(share * (CURVE - 1))]


def spread_windows(
    ids: Sequence[int] | npt.NDArray[np.uint16], bos: int | None, length: int, count: int
) -> list[Tensor]:
    """`count` windows (1, length) spread evenly over a document, each behind its own `<bos>` where there is one.

    Raises:
        DataError: the document is too short for them.
    """
    room = length - (bos is not None)
    if len(ids) < room * count:
        raise DataError(f"the document has {len(ids)} tokens, too few for {count} windows of {room}")
    head = [] if bos is None else [bos]
    starts = [i * (len(ids) - room) // max(1, count - 1) for i in range(count)]
    return [torch.tensor([[*head, *map(int, ids[start : start + room])]]) for start in starts]
