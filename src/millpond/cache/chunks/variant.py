"""One computation of a chunk: its keys and values per layer, and the context that it was computed after."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from millpond.cache.chunks.shape import StoredShape
from millpond.policy.reuse import contextual_impact, prefix_overlap, recompute_share


@dataclass(frozen=True, slots=True)
class VariantFacts:
    """What is known of a variant without its tensors.

    Attributes:
        chunk: key of the chunk's ids. n_tokens: of the chunk. prefix: key of all ids before it.
        before: keys of the parts before it, each once, in order. received: the attention that the chunk's tokens gave
            to each of them, summed over tokens and averaged over layers and heads.
        impact: CCI, see `contextual_impact`.
        exact: whether it was computed after a context that was computed in full.
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
        """CFO after a text of key `prefix` with parts `before`; 0 where it was computed after just this text."""
        if self.exact and self.prefix == prefix:
            return 0.0
        return recompute_share(self.impact, prefix_overlap(self.before, self.received, before), alpha)


@dataclass(frozen=True, slots=True, eq=False)
class ChunkVariant:
    """A variant as it was computed.

    Attributes:
        scores: (n_tokens,) float32, the attention of each token to all earlier parts.
        keys: per layer (Hkv, n_tokens, key_dim) before RoPE. values: per layer (Hkv, n_tokens, value_dim).
    """

    facts: VariantFacts
    scores: Tensor
    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]

    def stored(self, shape: StoredShape) -> StoredVariant:
        """As a store keeps it.

        Raises:
            NumericsError: a number that its format cannot hold.
        """
        tensors = {"scores": self.scores.detach().cpu()}
        both = (t for pair in zip(self.keys, self.values, strict=True) for t in pair)
        for (name, _, _, is_key), x in zip(shape.sides(), both, strict=True):
            tensors |= {name + suffix: t for suffix, t in shape.format.encode(x.detach(), is_key).items()}
        return StoredVariant(self.facts, shape, tensors)


@dataclass(frozen=True, slots=True, eq=False)
class StoredVariant:
    """A variant as a store keeps it.

    Attributes:
        tensors: those that `shape` names.
    """

    facts: VariantFacts
    shape: StoredShape
    tensors: dict[str, Tensor]

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.tensors.values())

    @property
    def scores(self) -> Tensor:
        """(n_tokens,) float32, the attention of each token to all earlier parts."""
        return self.tensors["scores"]

    def keys(self, layer: int) -> Tensor:
        """(Hkv, n_tokens, key_dim) before RoPE, on the CPU, in the format's dtype, float32 for codes."""
        return self._side(f"keys.{layer}", self.shape.layers[layer][1], True)

    def values(self, layer: int) -> Tensor:
        """(Hkv, n_tokens, value_dim), as `keys`."""
        return self._side(f"values.{layer}", self.shape.layers[layer][2], False)

    def _side(self, name: str, dim: int, is_key: bool) -> Tensor:
        kept = self.shape.format
        parts = {suffix: self.tensors[name + suffix] for suffix, _, _ in kept.parts(1, 1, dim, is_key)}
        return kept.decode(parts, dim, is_key)


def variant_of(
    chunk: str, prefix: str, exact: bool, before: dict[str, int], sums: Tensor, keys: list[Tensor], values: list[Tensor]
) -> ChunkVariant:
    """The variant of a chunk that was computed in full.

    Args:
        before: keys of the parts before it -> their tokens. sums: (n, len(before) + 1) float32, the attention of each
            token to each of these parts and to the chunk itself, averaged over layers and heads.
    """
    n, parts = len(sums), len(before)
    received = [float(x) for x in sums.double().sum(0)]
    impact = contextual_impact(received[:parts], list(before.values()), received[parts], n)
    facts = VariantFacts(chunk, n, prefix, tuple(before), tuple(received[:parts]), impact, exact)
    return ChunkVariant(facts, sums[:, :parts].sum(1), tuple(keys), tuple(values))
