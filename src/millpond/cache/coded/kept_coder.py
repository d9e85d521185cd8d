"""Coder of what caches of a model keep of a sequence: the tensors of its layers become codes, and come back."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from millpond.cache.coded.kept import FittedHeader, Kept, KeptEncoder
from millpond.cache.coded.kept_tensors import FITTED, KeptDecoder, kept_tensors
from millpond.cache.coded.text import unit_of
from millpond.cache.types import RotaryEmbedding
from millpond.codec.transform.transform_file import ModelTransform
from millpond.errors import DataError

#: Name of the entries in pages that the header of each part of a layer was fitted to; 0 for the calibration's.
MADE = "codes.made"


@dataclass(frozen=True, slots=True, eq=False)
class KeptCodes:
    """State of decoded codes that later codes of the sequence go on from.

    Attributes:
        headers: Headers by the number of their part.
        exact: For each layer (m,) int64 positions of entries that are exact.
    """

    headers: Mapping[int, FittedHeader]
    exact: Sequence[Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class KeptFacts:
    """Facts that the codes of a sequence follow from, besides what its layers hold.

    Attributes:
        ids: Tokens that it has read, (n,).
        exact: For each layer (m,) int64 positions that stay as they are, besides sinks and newest entries.
        before: What it was decoded from; None: it was not.
    """

    ids: np.ndarray
    exact: Sequence[Tensor]
    before: KeptCodes | None = None


class KeptCoder:
    """Codes what layers keep of sequences and decodes it; safe for several threads.

    Args:
        transform: The model's transform.
        bits: Mean bits a number.
        rotations: Rotation of the keys of each layer; None for one without.
        seconds: Where seconds are added up that it has coded ("encode") and decoded ("decode").
    """

    def __init__(
        self,
        transform: ModelTransform,
        bits: float,
        rotations: Sequence[RotaryEmbedding | None],
        seconds: dict[str, float],
    ) -> None:
        self._transform, self._bits, self._rotations, self._seconds = transform, bits, list(rotations), seconds

    def code(self, layers: Sequence[Mapping[str, Tensor]], facts: KeptFacts) -> list[dict[str, Tensor]]:
        """Return layers with codes in place of keys and values.

        Args:
            layers: Each as `millpond.cache.serialization.to_tensors` names it, on the host.
            facts: Of the sequence.

        Raises:
            OptionError: heads hold other tokens each, and the file has no parts for single heads.
        """
        began, before = time.perf_counter(), facts.before
        headers = {} if before is None else before.headers
        encoder = KeptEncoder(self._transform, self._bits, self._rotations, True, headers)
        for nth, stored in enumerate(layers):
            exact = facts.exact[nth] if before is None else torch.cat([facts.exact[nth], before.exact[nth]])
            encoder.add_chosen(Kept.of(stored, torch.device("cpu")), exact)
        coded = []
        for stored, parts in zip(layers, encoder.coded(unit_of(facts.ids)), strict=True):
            named = kept_tensors(stored, parts, len(facts.ids))
            named[MADE] = torch.tensor([part.made for part in parts], dtype=torch.int32)
            coded.append({name: tensor.contiguous() for name, tensor in named.items()})
        self._seconds["encode"] += time.perf_counter() - began
        return coded

    def decode(
        self, layers: Sequence[Mapping[str, Tensor]], ids: np.ndarray, dtype: torch.dtype, device: torch.device
    ) -> tuple[list[dict[str, Tensor]], KeptCodes]:
        """Return decoded layers, and what later codes of them go on from.

        Layers are as `millpond.cache.serialization.from_tensors` reads them.

        Args:
            layers: Layers from `code`.
            ids: Tokens that the sequence has read, (n,).
            dtype: Type of live entries.
            device: Device that computes, and of keys and values.

        Raises:
            DataError: they are damaged, do not fit together, or are of another text.
            OptionError: heads hold other tokens each, and the file has no parts for single heads.
        """
        began = time.perf_counter()
        unit = unit_of(ids)
        decoder = KeptDecoder(self._transform, self._bits, self._rotations, len(ids), unit, dtype, device)
        found, exact = [], []
        headers: dict[int, FittedHeader] = {}
        for nth, stored in enumerate(layers):
            made = stored.get(MADE)
            own = {name: tensor for name, tensor in stored.items() if name != MADE}
            layer, codes = decoder.layer_with_codes(nth, own)
            counts = _counts(nth, made, own[FITTED])
            for (number, header), n in zip(codes.headers.items(), counts, strict=True):
                headers[number] = FittedHeader(header, n)
            found.append(layer)
            exact.append(codes.exact)
        self._seconds["decode"] += time.perf_counter() - began
        return found, KeptCodes(headers, exact)


def _counts(layer: int, made: Tensor | None, fitted: Tensor) -> list[int]:
    """Return for each header of a layer the entries that it was fitted to.

    Raises:
        DataError: there are not as many as headers.
    """
    if (
        made is None
        or made.dtype != torch.int32
        or made.shape != fitted.shape
        or not torch.equal(made > 0, fitted > 0)
        or bool((made < 0).any())
    ):
        raise DataError(f"layer {layer}: codes do not say what their headers were fitted to; read the prompt again")
    return [n for n in made.tolist() if n]
