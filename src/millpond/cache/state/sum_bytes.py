"""Packing of sums over a prompt's queries into bytes for a disk, and unpacking, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from millpond.cache.state.prompt_sums import LayerSums, PromptSums, SumKind
from millpond.policy.scores.query_moments import QueryMoments


@dataclass(frozen=True, slots=True)
class SumForm:
    """Layout of packed sums.

    Attributes:
        kind: Kind of the sums.
        length: Tokens of the prompt before their position.
        shapes: Shape and type of each tensor, in their order.
        counts: Number of queries of each layer's moments; None for a layer without moments.
        columns: Whether each layer has column sums.
    """

    kind: SumKind
    length: int
    shapes: tuple[tuple[tuple[int, ...], torch.dtype], ...]
    counts: tuple[int | None, ...]
    columns: tuple[bool, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in self.shapes)


def pack_sums(sums: Mapping[SumKind, PromptSums]) -> tuple[Tensor, tuple[SumForm, ...]]:
    """Return sums as bytes (n,) uint8, and their layout.

    Kinds that keep the queries themselves are left out: they hold only the part since the previous sums, without which
    they are of no use.
    """
    forms, parts = [], [torch.zeros(0, dtype=torch.uint8)]
    for kind, one in sums.items():
        if kind.queries:
            continue
        tensors = list(_tensors(one))
        parts += [x.cpu().contiguous().flatten().view(torch.uint8) for x in tensors]
        forms.append(
            SumForm(
                kind,
                one.length,
                tuple((tuple(x.shape), x.dtype) for x in tensors),
                tuple(None if layer.moments is None else layer.moments.count for layer in one.layers),
                tuple(layer.columns is not None for layer in one.layers),
            )
        )
    return torch.cat(parts), tuple(forms)


def unpack_sums(data: Tensor, forms: tuple[SumForm, ...], device: torch.device) -> dict[SumKind, PromptSums]:
    """Return the sums that `pack_sums` packed, on a device."""
    found, place = {}, 0
    for form in forms:
        tensors = []
        for shape, dtype in form.shapes:
            end = place + torch.Size(shape).numel() * dtype.itemsize
            tensors.append(data[place:end].clone().view(dtype).reshape(shape).to(device))
            place = end
        rest, layers = iter(tensors), []
        for has_columns, count in zip(form.columns, form.counts, strict=True):
            columns = next(rest) if has_columns else None
            moments = None if count is None else QueryMoments(count, next(rest), next(rest))
            layers.append(LayerSums(columns, moments, None))
        found[form.kind] = PromptSums(form.length, layers)
    return found


def _tensors(sums: PromptSums) -> Iterator[Tensor]:
    for layer in sums.layers:
        if layer.columns is not None:
            yield layer.columns
        if layer.moments is not None:
            yield layer.moments.total
            yield layer.moments.outer
