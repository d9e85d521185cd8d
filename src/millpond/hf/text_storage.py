"""Codec `transform` for a text that a cache reads: its queries are sampled, its layers become codes and come back."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from millpond.cache.coded.entries import moments, projected
from millpond.cache.coded.kept import Kept, KeptEncoder
from millpond.cache.coded.kept_tensors import PLAIN, is_plain, kept_tensors
from millpond.cache.layer.layer_cache import LayerCache
from millpond.cache.serialization import to_tensors
from millpond.codec import codecs_of, resolve
from millpond.codec.transform.coding import encode
from millpond.codec.transform.exact_tokens import (
    FAR,
    MOST_QUERIES,
    NEWEST,
    QUERY_STEP,
    SINKS,
    UNIT,
    attention_per_query,
    attention_to_kept,
    most_attended,
    most_attended_of_units,
)
from millpond.codec.transform.page import TOKENS, PageAddress
from millpond.codec.transform.prompt_header import LayerHeader, adapted_headers
from millpond.codec.transform.storage_codec import parse_storage_codec
from millpond.codec.transform.transform_cache import cached_transform
from millpond.codec.transform.transform_file import ModelTransform, fitted_model_of
from millpond.errors import CacheMismatchError, OptionError
from millpond.hf.cache import MillpondCache
from millpond.hf.calibration.load import model_mark, rotations_before_rope
from millpond.hf.calibration.transform import fitted_model
from millpond.hf.model_profile import ModelProfile, entry_dims, named
from millpond.hf.model_support import supported, unwrapped
from millpond.hf.signals.rotary import ModelRotation
from millpond.kernels.args import AttentionShape
from millpond.models.installed import transform_files
from millpond.policy.codec_refusal import storage_refusal

#: A transform, or its file.
TransformSource = ModelTransform | str | os.PathLike[str] | None
#: Formats of documents whose entries are codes: of a text that is held whole, and of one that is not.
CODED, KEPT = "millpond-document-coded-1", "millpond-document-coded-kept-1"
#: Numbers of a layer that are stored as they are.
SMALL = ("capacities", "recent", "head_rules", "shape")


@dataclass(frozen=True, slots=True)
class StoredCodes:
    """Layers of a text as a document holds them.

    Attributes:
        facts: Format, codec and transform, as texts.
        tensors: On the CPU, by name.
    """

    facts: Mapping[str, str]
    tensors: dict[str, Tensor]


def transform_of(model: PreTrainedModel, source: TransformSource) -> ModelTransform:
    """Return a transform for a model, checked.

    Args:
        model: The model.
        source: A transform or its file; None for the file of this model that comes with millpond-models.

    Raises:
        OptionError: there is none.
        DataError: the file cannot be read, or is damaged.
        CacheMismatchError: it was made for another model.
    """
    model = unwrapped(model)
    if source is None:
        source = _shipped_file(model)
    transform = source if isinstance(source, ModelTransform) else cached_transform(source)
    profile = supported(model)
    here = fitted_model(model, profile, transform.model.shapes)
    if here.weights != transform.model.weights:
        here = replace(here, shapes=_shapes(profile) or transform.model.shapes)
    transform.model.check_equal(here)
    if len(transform.layers) != profile.n_layers:
        raise CacheMismatchError(f"the transform file has {len(transform.layers)} layers, the model {profile.n_layers}")
    return transform


def _shipped_file(model: PreTrainedModel) -> Path:
    """Return the file of a model that comes with millpond-models.

    Raises:
        OptionError: there is none.
    """
    mark = model_mark(model)
    for file in transform_files():
        if fitted_model_of(file).weights == mark:
            return file
    raise OptionError(
        "the storage codec 'transform' needs a transform file of this model, and none comes with millpond-models: make "
        "one with 'millpond calibrate --codec transform --out NAME.safetensors' (about two minutes of one core for 135 "
        "million parameters), and give it as calibration"
    )


def _shapes(profile: ModelProfile) -> tuple[tuple[int, int, int], ...] | None:
    """Return the shapes of all layers by the configuration; None if it does not name them."""
    dims, heads = entry_dims(profile), named(profile.config, "num_key_value_heads") or profile.n_heads
    return None if dims is None or not heads else ((int(heads), *dims[0]),) * profile.n_layers


class TextStorage:
    """Codec of one text that a cache reads after this was made, for `save_document`.

    Args:
        cache: Empty cache in plain numbers, of the method `full` or of one that evicts.
        codec: Name such as "transform:1.5".
        calibration: The model's transform or its file.
        adapt: Whether means, scales and bits are fitted to the text; else they are the calibration's.
        by_unit: Whether three of each 256 tokens are exact by the queries of these, which later tokens do not change;
            else the 1 % are exact that 256 queries, spread evenly over the text, attend to most. For `full` alone.

    Raises:
        OptionError: no such codec, no file, one of fewer bits or without parts for single heads where the method needs
            them, or a cache whose method or number format has no codes.
        CacheMismatchError: a transform of another model, or a cache that has read something.
        DataError: the file cannot be read.
    """

    def __init__(
        self,
        cache: MillpondCache,
        codec: str,
        calibration: TransformSource,
        *,
        adapt: bool = True,
        by_unit: bool = False,
    ) -> None:
        self.codec = parse_storage_codec(codec)
        model = cache.model()
        if model is None or cache.get_seq_length():
            raise CacheMismatchError("a storage codec looks at the queries of the text: set it before one is read")
        _check_plain(cache, self.codec.name)
        if by_unit and not cache.policy.keeps_all:
            raise OptionError("by_unit judges tokens of whole units of 256, and this cache evicts some: leave it out")
        self.transform = transform_of(model, calibration)
        self.transform.check_bits(self.codec.bits)
        if cache.policy.heads_differ and any(heads > 1 for heads, _, _ in self.transform.model.shapes):
            self.transform.digest_of_heads()
        self.adapt, self.by_unit = adapt, by_unit
        self._queries: dict[int, list[Tensor]] = {}
        self._seen: dict[int, int] = {}
        cache.watch(self._sample)

    def _sample(self, number: int, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, shape: AttentionShape) -> None:
        """Hold every 16th query of a layer."""
        begin = self._seen.get(number, 0)
        first = (QUERY_STEP - 1 - begin) % QUERY_STEP
        self._queries.setdefault(number, []).append(q[0, :, first::QUERY_STEP].clone())
        self._seen[number] = begin + q.shape[2]

    def encoded(self, cache: MillpondCache, unit: int) -> StoredCodes:
        """Return all layers as named tensors: pages, headers and exact tokens.

        Args:
            cache: The cache, after the text.
            unit: Number of the text, in every page.

        Raises:
            OptionError: a layer holds more than the entries of its tokens.
            CacheMismatchError: not all that it has read came after this was made.
        """
        model = cache.model()
        assert model is not None, "the caller checked it"
        rotations = rotations_before_rope(supported(unwrapped(model)))
        facts = {"format": CODED, "storage": self.codec.name, "transform": self.transform.digest()}
        if cache.policy.keeps_all and not cache.tracker.marks.dropped:
            return StoredCodes(facts, self._whole(cache, unit, model.device, rotations))
        facts["format"] = KEPT
        if self.transform.heads:
            facts["heads"] = self.transform.digest_of_heads()
        return StoredCodes(facts, self._kept(cache, unit, model.device, rotations))

    def _kept(
        self, cache: MillpondCache, unit: int, device: torch.device, rotations: list[ModelRotation | None]
    ) -> dict[str, Tensor]:
        """Return the layers of a text of which entries were evicted or forgotten."""
        n_tokens = int(cache.tracker.seen[0])
        encoder, layers = KeptEncoder(self.transform, self.codec.bits, rotations, self.adapt), []
        for nth, (number, layer_cache) in enumerate(cache.entry_layers.items()):
            stored = to_tensors(layer_cache)
            if not is_plain(stored):
                raise OptionError(f"storage codec {self.codec.name!r}: layer {number} holds more than its entries")
            kept = Kept.of(stored, device)
            self._check_shapes(number, nth, kept.keys, kept.values)
            queries, at = self._sampled(number, n_tokens, device)
            encoder.add(kept, attention_to_kept(queries, at, kept.keys, kept.positions, layer_cache.attention.shape))
            layers.append((layer_cache.index, stored))
        tensors: dict[str, Tensor] = {}
        for (index, stored), parts in zip(layers, encoder.coded(unit), strict=True):
            named = kept_tensors(stored, parts, n_tokens)
            tensors |= {f"{index}.{name}": tensor.contiguous() for name, tensor in named.items()}
        return tensors

    def _check_shapes(self, number: int, nth: int, keys: Tensor, values: Tensor) -> None:
        shapes = (len(keys), keys.shape[2], values.shape[2])
        if shapes != self.transform.model.shapes[nth]:
            raise CacheMismatchError(f"layer {number} has shapes {shapes}, which the transform file has not")

    def _whole(
        self, cache: MillpondCache, unit: int, device: torch.device, rotations: list[ModelRotation | None]
    ) -> dict[str, Tensor]:
        """Return the layers of a text that is held whole."""
        layers, exact, projections, sums = [], [], [], []
        for nth, (number, layer_cache) in enumerate(cache.entry_layers.items()):
            layer = _LayerEntries.of(layer_cache, self.codec.name, device)
            self._check_shapes(number, nth, layer.keys, layer.values)
            mask = self._exact(number, layer)
            coded = (layer.keys[:, : layer.coded], layer.values[:, : layer.coded])
            z = projected(self.transform.layers[nth], *coded, layer.first, rotations[nth])
            layers.append(layer)
            exact.append(mask)
            projections.append(z)
            sums += [moments(side, ~mask[: layer.coded]) for side in z]
        headers = self._headers(sums)
        tensors: dict[str, Tensor] = {}
        for nth, (layer, mask, z) in enumerate(zip(layers, exact, projections, strict=True)):
            pages = encode(self.transform.layers[nth], headers[nth], z, PageAddress(unit, nth))
            at = mask.nonzero()[:, 0].to(layer.keys.device)
            kind = torch.float16 if layer.keys.dtype == torch.float16 else torch.bfloat16
            part = {
                "pages": pages,
                "key_header": headers[nth].key.to_bytes(),
                "value_header": headers[nth].value.to_bytes(),
                "span": torch.tensor([layer.first, layer.n]),
                "exact.at": at.int(),
                "exact.keys": layer.keys[:, at].to(kind),
                "exact.values": layer.values[:, at].to(kind),
                **{name: layer.small[name] for name in SMALL},
            }
            tensors |= {f"{layer.index}.{name}": t.cpu().contiguous() for name, t in part.items()}
        return tensors

    def _exact(self, number: int, layer: _LayerEntries) -> Tensor:
        """Return which of the held tokens are stored as they are, (n,) bool."""
        queries, at = self._sampled(number, layer.first + layer.n, layer.keys.device)
        at = at - layer.first
        unit, least = (UNIT, FAR) if self.by_unit else (layer.n, 1)
        attention = attention_per_query(queries[:, at >= 0], at[at >= 0], layer.keys, layer.shape, unit, least)
        sinks = max(0, SINKS - layer.first)
        attention[:sinks] = 0
        if self.by_unit:
            mask = most_attended_of_units(attention)
        else:
            mask = torch.zeros_like(attention, dtype=torch.bool)
            mask[sinks : layer.coded] = most_attended(attention[sinks : layer.coded])
        mask[:sinks], mask[layer.coded :] = True, True
        return mask.cpu()

    def _sampled(self, number: int, n_tokens: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return sampled queries (Hq, m, D) of a layer, and their positions (m,).

        By unit it is every 16th; else 256 of these at most, evenly spread.

        Raises:
            CacheMismatchError: they are not those of all tokens.
        """
        if self._seen.get(number, 0) != n_tokens:
            raise CacheMismatchError(f"layer {number}: the storage codec has not seen all queries of this text")
        queries = torch.cat(self._queries[number], 1)
        every = 1 if self.by_unit else max(1, -(-queries.shape[1] // MOST_QUERIES))
        queries = queries[:, every - 1 :: every].to(device)
        return queries, (torch.arange(queries.shape[1], device=device) + 1) * (QUERY_STEP * every) - 1

    def _headers(self, sums: list[tuple[Tensor, Tensor]]) -> list[LayerHeader]:
        layers = self.transform.layers
        if not self.adapt:
            sums = [(torch.zeros_like(mean), torch.ones_like(scale)) for mean, scale in sums]
        return adapted_headers(layers, sums, self.codec.bits)


@dataclass(frozen=True, slots=True)
class _LayerEntries:
    """Entries of a layer that holds the same tokens in all heads, `first` to `first + n - 1`.

    Attributes:
        index: Number of the layer among the attention layers.
        first: Position of the first.
        n: Their number.
        coded: Of these, how many of the first are in pages.
        keys: (H, n, D).
        values: (H, n, V).
        shape: Settings of the attention.
        small: Numbers that are stored as they are.
    """

    index: int
    first: int
    n: int
    coded: int
    keys: Tensor
    values: Tensor
    shape: AttentionShape
    small: dict[str, Tensor]

    @classmethod
    def of(cls, layer_cache: LayerCache, codec: str, device: torch.device) -> _LayerEntries:
        """Read a layer; keys and values are on `device`.

        Raises:
            OptionError: it holds more than the entries of its tokens, or other tokens in each head.
        """
        stored = to_tensors(layer_cache)
        positions, lens = stored["positions"], stored["lens"]
        n = int(lens.max())
        first = int(positions[0, 0]) if n else 0
        same = set(stored) <= PLAIN and bool((lens == n).all()) and not bool(stored["scores"].any())
        if not same or not bool((positions[:, :n] == torch.arange(first, first + n)).all()):
            raise OptionError(
                f"storage codec {codec!r}: layer {layer_cache.index} holds other tokens in each head, or more than "
                "keys and values; use the method 'full' with codec 'auto'"
            )
        pages = max(0, n - NEWEST) // TOKENS
        keys, values = (stored[name][:, :n].to(device) for name in ("keys", "values"))
        small = {name: stored[name] for name in SMALL}
        return cls(layer_cache.index, first, n, pages * TOKENS, keys, values, layer_cache.attention.shape, small)


def _check_plain(cache: MillpondCache, codec: str) -> None:
    """Check that a cache keeps entries as they are, in plain numbers.

    Raises:
        OptionError: it does not.
    """
    settings = cache.settings or {}
    reason = storage_refusal(cache.policy)
    if reason is not None:
        raise OptionError(f"storage codec {codec!r} with method {settings.get('method')!r}: {reason}")
    if codecs_of(resolve(settings.get("codec", "auto"))):
        raise OptionError(
            f"storage codec {codec!r} is made from plain numbers, and codec {settings['codec']!r} has codes already: "
            "leave the codec out"
        )
