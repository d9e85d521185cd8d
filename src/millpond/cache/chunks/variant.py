"""Variant of a chunk: its key, shape and number format, its keys and values, and the context before it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, get_args

import numpy as np
import torch
from torch import Tensor

from millpond.cache.chunks.coded import ChunkCodec
from millpond.codec.transform.storage_codec import StorageCodec, parse_storage_codec
from millpond.errors import unknown
from millpond.kernels.packed.groups import Groups, decode_affine, encode_affine
from millpond.policy.reuse import contextual_impact, prefix_overlap, recompute_share

#: Formats by name; "auto": that of the model.
RestName = Literal["auto", "float32", "bf16", "int8", "int4"]
#: Numbers that share a scale.
GROUP = 32
_FLOATS = {"float32": torch.float32, "bf16": torch.bfloat16}
_BITS = {"int8": 8, "int4": 4}

#: Suffix of a tensor's name, its shape and its dtype.
Part = tuple[str, tuple[int, ...], torch.dtype]


def check_rest(name: str) -> RestName | StorageCodec:
    """Return the name of a format, checked, or the storage codec of its name.

    Raises:
        OptionError: there is no such format.
    """
    if name.startswith("transform"):
        return parse_storage_codec(name)
    for format_name in get_args(RestName):
        if name == format_name:
            return format_name  # type: ignore[no-any-return]
    raise unknown("dtype of a chunk store", str(name), get_args(RestName))


@dataclass(frozen=True, slots=True)
class RestFormat:
    """Format of stored keys (Hkv, n, key_dim) and values (Hkv, n, value_dim) of one layer.

    Attributes:
        name: Name of the format, see `RestName`.
        model: Dtype of the model's keys and values.
    """

    name: RestName
    model: torch.dtype

    @property
    def bits(self) -> int | None:
        """Bits of a code; None if numbers are stored as floats."""
        return _BITS.get(self.name)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the numbers, if they are no codes."""
        return _FLOATS.get(self.name, self.model)

    @property
    def exact(self) -> bool:
        """Whether numbers are stored bit for bit."""
        return self.bits is None and torch.promote_types(self.dtype, self.model) == self.dtype

    def parts(self, heads: int, n: int, dim: int, is_key: bool) -> list[Part]:
        """Return name, shape and dtype of the tensors of keys or values (heads, n, dim)."""
        if self.bits is None:
            return [("", (heads, n, dim), self.dtype)]
        runs = (heads, -(-n // GROUP), dim) if is_key else (heads, n, dim // _group(dim))
        codes = (heads, n, dim if self.bits == 8 else -(-dim // 2))
        return [("", codes, torch.uint8), (".scales", runs, torch.float16), (".zeros", runs, torch.float16)]

    def nbytes(self, heads: int, n: int, dim: int, is_key: bool) -> int:
        """Return the bytes of these tensors."""
        return sum(torch.Size(shape).numel() * dtype.itemsize for _, shape, dtype in self.parts(heads, n, dim, is_key))

    def encode(self, x: Tensor, is_key: bool) -> dict[str, Tensor]:
        """Return keys or values x (heads, n, dim), n > 0, as CPU tensors by suffixes of `parts`.

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
        """Return the numbers (heads, n, dim) of these tensors: float32 for codes, else as stored."""
        codes = parts[""]
        if self.bits is None:
            return codes
        if self.bits == 4:
            codes = torch.stack([codes & 15, codes >> 4], -1).flatten(2)[..., :dim]
        n = codes.shape[1]
        grouped = _by_channel(codes) if is_key else codes.reshape(*codes.shape[:2], -1, _group(dim))
        numbers = decode_affine(Groups(grouped, parts[".scales"], parts[".zeros"]), self.bits)
        return numbers.transpose(2, 3).flatten(1, 2)[:, :n] if is_key else numbers.flatten(2)


def _group(dim: int) -> int:
    return GROUP if dim % GROUP == 0 else dim


def _by_channel(x: Tensor) -> Tensor:
    """Return x (heads, n, dim) as (heads, runs, dim, GROUP).

    The last run is filled up with its last token, which widens no range.
    """
    missing = -x.shape[1] % GROUP
    if missing:
        x = torch.cat([x, x[:, -1:].expand(-1, missing, -1)], 1)
    return x.reshape(len(x), -1, GROUP, x.shape[2]).transpose(2, 3)


@dataclass(frozen=True, slots=True)
class StoredShape:
    """Shape and format that all variants of one model have in common.

    Attributes:
        model: Mark that distinguishes the model, its weights and its dtype from others.
        dtype: Dtype of its keys and values.
        layers: (n_kv_heads, key_dim, value_dim) of each layer.
        rest: Name of the format in a store.
        codec: Storage codec of a store, in place of the format; None: there is none.
    """

    model: str
    dtype: torch.dtype
    layers: tuple[tuple[int, int, int], ...]
    rest: RestName = "auto"
    codec: ChunkCodec | None = field(default=None, compare=False)

    @property
    def exact(self) -> bool:
        """Whether numbers are stored bit for bit."""
        return self.codec is None and self.format.exact

    @property
    def format(self) -> RestFormat:
        """Format of keys and values in a store."""
        return RestFormat(self.rest, self.dtype)

    @property
    def mark(self) -> str:
        """Mark that distinguishes files of this model in this format from others."""
        if self.codec is not None:
            return f"{self.model}-{self.codec.mark}"
        return self.model if self.rest == "auto" else f"{self.model}-{self.rest}"

    def decoded(self, tensors: Mapping[str, Tensor], name: str, dim: int, is_key: bool) -> Tensor:
        """Return the keys or values `name` (Hkv, n, dim) of a variant's tensors, as numbers.

        Raises:
            DataError: a page of a storage codec is damaged.
        """
        if self.codec is not None:
            return self.codec.decode(int(name.rpartition(".")[2]), tensors, len(tensors["scores"]))[not is_key]
        parts = {suffix: tensors[name + suffix] for suffix, _, _ in self.format.parts(1, 1, dim, is_key)}
        return self.format.decode(parts, dim, is_key)

    def nbytes(self, n_tokens: int) -> int:
        """Return the bytes of a variant of a chunk of `n_tokens` tokens."""
        tensors = self.tensors(n_tokens)
        return sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in tensors.values())

    def fits(self, n_tokens: int, tensors: Mapping[str, Tensor]) -> bool:
        """Whether these are the tensors of a variant, all of the right shapes and dtypes."""
        return {name: (tuple(t.shape), t.dtype) for name, t in tensors.items()} == self.tensors(n_tokens)

    def sides(self) -> Iterator[tuple[str, int, int, bool]]:
        """Yield name, heads, dim and `is_key` of the keys and of the values of each layer."""
        for layer, (heads, key_dim, value_dim) in enumerate(self.layers):
            yield f"keys.{layer}", heads, key_dim, True
            yield f"values.{layer}", heads, value_dim, False

    def names_by_layer(self) -> list[list[str]]:
        """Return the names of the tensors of each layer."""
        if self.codec is not None:
            return [list(self.codec.tensors(layer, 0)) for layer in range(len(self.layers))]
        names: list[list[str]] = [[] for _ in self.layers]
        for name, _, dim, is_key in self.sides():
            names[int(name.rpartition(".")[2])] += [
                name + suffix for suffix, _, _ in self.format.parts(1, 1, dim, is_key)
            ]
        return names

    def tensors(self, n: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Return shape and dtype of the tensors of a variant of n tokens, by name."""
        tensors: dict[str, tuple[tuple[int, ...], torch.dtype]] = {"scores": ((n,), torch.float32)}
        if self.codec is not None:
            for layer in range(len(self.layers)):
                tensors |= self.codec.tensors(layer, n)
            return tensors
        for name, heads, dim, is_key in self.sides():
            tensors |= {
                name + suffix: (shape, dtype) for suffix, shape, dtype in self.format.parts(heads, n, dim, is_key)
            }
        return tensors


@dataclass(frozen=True, slots=True)
class VariantFacts:
    """Facts of a variant without its tensors.

    Attributes:
        chunk: Key of the chunk's ids.
        n_tokens: Tokens of the chunk.
        prefix: Key of all ids before it.
        before: Keys of the parts before it, each once, in order.
        received: Attention that the chunk's tokens gave to each of them, summed over tokens and averaged over layers
            and heads.
        impact: CCI, see `contextual_impact`.
        exact: Whether it was computed after a context that was computed in full.
    """

    chunk: str
    n_tokens: int
    prefix: str
    before: tuple[str, ...]
    received: tuple[float, ...]
    impact: float
    exact: bool

    @property
    def name(self) -> str:
        """Its name among the variants of its chunk."""
        return f"{self.prefix[:40]}-{'exact' if self.exact else 'blended'}"

    def share(self, prefix: str, before: list[str], alpha: float) -> float:
        """Return the CFO after a text of key `prefix` with parts `before`.

        It is 0 if the variant was computed after just this text.
        """
        if self.exact and self.prefix == prefix:
            return 0.0
        return recompute_share(self.impact, prefix_overlap(self.before, self.received, before), alpha)


@dataclass(frozen=True, slots=True, eq=False)
class ChunkVariant:
    """Variant as it was computed.

    Attributes:
        facts: Facts of the variant.
        scores: Attention of each token to all earlier parts, (n_tokens,) float32.
        keys: Keys before RoPE of each layer, (Hkv, n_tokens, key_dim).
        values: Values of each layer, (Hkv, n_tokens, value_dim).
    """

    facts: VariantFacts
    scores: Tensor
    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]

    def stored(self, shape: StoredShape) -> StoredVariant:
        """Return the variant as a store keeps it.

        Raises:
            NumericsError: a number that its format cannot hold.
        """
        tensors = {"scores": self.scores.detach().cpu()}
        if shape.codec is not None:
            for layer, (keys, values) in enumerate(zip(self.keys, self.values, strict=True)):
                tensors |= shape.codec.encode(layer, keys.detach(), values.detach())
            return StoredVariant(self.facts, shape, tensors)
        tensors_by_side = (t for pair in zip(self.keys, self.values, strict=True) for t in pair)
        for (name, _, _, is_key), x in zip(shape.sides(), tensors_by_side, strict=True):
            tensors |= {name + suffix: t for suffix, t in shape.format.encode(x.detach(), is_key).items()}
        return StoredVariant(self.facts, shape, tensors)


class ReadableVariant(Protocol):
    """Variant whose keys and values can be read, if not all at once."""

    @property
    def facts(self) -> VariantFacts:
        """Facts of the variant."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors."""
        ...

    @property
    def scores(self) -> Tensor:
        """Attention of each token to all earlier parts, (n_tokens,) float32."""
        ...

    def keys(self, layer: int) -> Tensor:
        """Return the keys before RoPE, (Hkv, n_tokens, key_dim), see `StoredVariant`."""
        ...

    def values(self, layer: int) -> Tensor:
        """Return the values, (Hkv, n_tokens, value_dim)."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class StoredVariant:
    """Variant as a store keeps it.

    Attributes:
        facts: Facts of the variant.
        shape: Shape and format of its tensors.
        tensors: Tensors by the names of `shape`.
    """

    facts: VariantFacts
    shape: StoredShape
    tensors: dict[str, Tensor]

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.tensors.values())

    @property
    def scores(self) -> Tensor:
        """Attention of each token to all earlier parts, (n_tokens,) float32."""
        return self.tensors["scores"]

    def keys(self, layer: int) -> Tensor:
        """Return the keys before RoPE, (Hkv, n_tokens, key_dim), on the CPU.

        They have the format's dtype, float32 for codes.
        """
        return self._side(f"keys.{layer}", self.shape.layers[layer][1], True)

    def values(self, layer: int) -> Tensor:
        """Return the values, (Hkv, n_tokens, value_dim), as `keys`."""
        return self._side(f"values.{layer}", self.shape.layers[layer][2], False)

    def _side(self, name: str, dim: int, is_key: bool) -> Tensor:
        return self.shape.decoded(self.tensors, name, dim, is_key)


def variant_of(
    chunk: str, prefix: str, exact: bool, before: dict[str, int], sums: Tensor, keys: list[Tensor], values: list[Tensor]
) -> ChunkVariant:
    """Return the variant of a chunk that was computed in full.

    Args:
        chunk: Key of the chunk's ids.
        prefix: Key of all ids before it.
        exact: Whether the context before it was computed in full.
        before: Tokens of the parts before it, by their keys.
        sums: (n, len(before) + 1) float32, the attention of each token to each of these parts and to the chunk itself,
            averaged over layers and heads.
        keys: Keys before RoPE of each layer, (Hkv, n, key_dim).
        values: Values of each layer, (Hkv, n, value_dim).
    """
    n, parts = len(sums), len(before)
    received = [float(x) for x in sums.double().sum(0)]
    impact = contextual_impact(received[:parts], list(before.values()), received[parts], n)
    facts = VariantFacts(chunk, n, prefix, tuple(before), tuple(received[:parts]), impact, exact)
    return ChunkVariant(facts, sums[:, :parts].sum(1), tuple(keys), tuple(values))


def ids_key(ids: Sequence[int] | np.ndarray) -> str:
    """Return the SHA-256 of token ids in hex, equal only for equal ids."""
    return hashlib.sha256(np.asarray(ids, dtype="<i8").tobytes()).hexdigest()


def salted(key: str, salt: str) -> str:
    """Return the key of a chunk for requests with one salt, which cannot be read from it."""
    return hashlib.sha256(f"{key} ".encode() + salt.encode("utf-8", "surrogatepass")).hexdigest()
