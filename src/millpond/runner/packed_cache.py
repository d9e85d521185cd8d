"""Cache of one pass over the tokens of many sequences, cut into segments at each attention."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import Cache

from millpond.cache.batch_cache import BatchCache, Pages
from millpond.cache.layer.fused_steps import FusedSteps
from millpond.cache.layer.layer_cache import LayerCache
from millpond.cache.layer.prompt_pass import PartialSpan
from millpond.cache.pages.ref_counted_pool import Pool
from millpond.cache.state.recurrent_states import RecurrentStates
from millpond.errors import CacheMismatchError, UnsupportedModelError
from millpond.hf.adapter import Rows
from millpond.hf.attention import tag
from millpond.hf.attention_inputs import AttentionInputs
from millpond.hf.layer import EmptyLayer, PassLayer
from millpond.kernels.args import AttentionShape
from millpond.policy.trained.adapter import Adapter

#: attend(layer, q (N, n_heads, D), k, v (N, n_kv_heads, D), shape) -> (N, n_heads, value_dim).
LayerAttend = Callable[[int, Tensor, Tensor, Tensor, AttentionShape], Tensor]


@dataclass(frozen=True, slots=True)
class Segment:
    """Rows of a pass that go to one batch of caches.

    Attributes:
        layer_caches: Caches of all layers with attention.
        begin: First row.
        end: Row after the last one.
        decoding: Whether each row is one sequence's; else all rows are one sequence's.
        states: States of its sequences, in a hybrid.
        stack: Batch cache of the caches, where some
            of their pages come for the pass.
        partial: Whether the rows are some of a run of tokens, whose others are in the cache.
    """

    layer_caches: Sequence[LayerCache]
    begin: int
    end: int
    decoding: bool
    states: RecurrentStates | None = None
    batch_cache: BatchCache | None = None
    partial: PartialSpan | None = None


class SegmentedAttention:
    """Attention of each layer, segment by segment.

    Attributes:
        segments: Segments that cut all rows of the pass, in order.
        reads_hidden: Whether a method of theirs scores entries by hidden states, see `give_hidden`.
    """

    def __init__(self, segments: Sequence[Segment]) -> None:
        self.segments = segments
        self.reads_hidden = any(each.policy.reads_hidden for segment in segments for each in segment.layer_caches[:1])
        self._hidden: dict[int, Tensor] = {}
        self._growth = _growth(segments)
        self._partial = any(segment.partial is not None for segment in segments)

    def give_hidden(self, index: int, hidden: Tensor) -> None:
        """Hand over what a layer's attention reads, (T, width), before `rows` or `attend`."""
        self._hidden[index] = hidden

    def rows(self, index: int, q: Tensor, k: Tensor, v: Tensor, shape: AttentionShape) -> Tensor:
        """Return attention (T, Hq, value_dim) of q (T, Hq, D) to k and v (T, H, D)."""
        hidden = self._hidden.pop(index, None)
        if len(self.segments) == 1:
            return self._one(0, index, q, k, v, shape, hidden)
        outs = []
        for n, segment in enumerate(self.segments):
            own = slice(segment.begin, segment.end)
            outs.append(self._one(n, index, q[own], k[own], v[own], shape, None if hidden is None else hidden[own]))
        return torch.cat(outs)

    def narrow(self, index: int) -> Tensor | None:
        """Return which rows of the pass go on behind layer `index`; None: all.

        The segments hold these rows alone from then on. They are (n,) int64, ascending, on the host.
        """
        if not self._partial:
            return None
        fewer = [None if segment.partial is None else segment.partial.narrow(index) for segment in self.segments]
        if not any(fewer):
            return None
        segments: list[Segment] = []
        stay: list[Tensor] = []
        begin = 0
        for segment, narrowed in zip(self.segments, fewer, strict=True):
            partial, rows = narrowed or (segment.partial, torch.arange(segment.end - segment.begin))
            stay.append(segment.begin + rows)
            segments.append(replace(segment, begin=begin, end=begin + len(rows), partial=partial))
            begin += len(rows)
        self.segments = segments
        return torch.cat(stay)

    def attend(self, index: int, q: Tensor, k: Tensor, v: Tensor, shape: AttentionShape) -> Tensor:
        """Return attention (1, Hq, T, value_dim) of q (1, Hq, T, D) to k and v (1, H, T, D)."""
        q, k, v = (t[0].transpose(0, 1) for t in (q, k, v))
        return self.rows(index, q, k, v, shape)[None].transpose(1, 2)

    def steps(self, shapes: Sequence[AttentionShape], changes_basis: bool) -> FusedSteps | None:
        """Prepare all layers for one decoding step; None unless one segment's layers are fusable.

        Args:
            shapes: Shape of each layer's attention.
            changes_basis: Whether the caller minds `FusedSteps.bases`.
        """
        segment = self.segments[0]
        n, layer_caches = segment.end - segment.begin, segment.layer_caches
        if len(self.segments) > 1 or not segment.decoding:
            return None
        return FusedSteps.begin(layer_caches, n, shapes, changes_basis)

    def attend_shared(self, index: int, q: Tensor, value_dim: int, shape: AttentionShape) -> Tensor:
        """Return attention of a later layer to entries of layer `index`, (1, Hq, T, value_dim).

        Args:
            index: Layer whose entries are read.
            q: Queries of the later layer, (1, Hq, T, D).
            value_dim: Numbers of a value.
            shape: Shape of the later layer's attention.
        """
        out = q.new_empty(*q.shape[:3], value_dim)
        for segment in self.segments:
            shared = segment.layer_caches[index].shared
            assert shared is not None, "a layer whose keys are read by others"
            rows = q[:, :, segment.begin : segment.end]
            if segment.decoding:  # rows are sequences
                out[0, :, segment.begin : segment.end] = shared.attend(rows[0].transpose(0, 1)[:, :, None], shape)[
                    :, :, 0
                ].transpose(0, 1)
            else:
                out[:, :, segment.begin : segment.end] = shared.attend(rows, shape)
        return out

    def clear_shared(self) -> None:
        """Clear what later layers read of a pass, at its beginning and end."""
        for segment in self.segments:
            for layer_cache in segment.layer_caches:
                if layer_cache.shared is not None:
                    layer_cache.shared.clear()

    def _one(
        self, number: int, index: int, q: Tensor, k: Tensor, v: Tensor, shape: AttentionShape, hidden: Tensor | None
    ) -> Tensor:
        """Return attention (n, Hq, value_dim) of the rows of one segment."""
        segment = self.segments[number]
        layer_cache, batch_cache = segment.layer_caches[index], segment.batch_cache
        with (
            nullcontext()
            if batch_cache is None
            else batch_cache.in_memory(layer_cache, self._following(number, index), self._growth)
        ):
            if segment.decoding:
                return layer_cache.attend_newest(q, k, v, shape, hidden)
            if segment.partial is not None:
                q, k, v = (t.transpose(0, 1) for t in (q, k, v))
                return layer_cache.attend_partial(q, k, v, segment.partial, shape).transpose(0, 1)
            q, k, v = (t.transpose(0, 1)[None] for t in (q, k, v))
            states = None if hidden is None else hidden[None]
            return layer_cache.attend(q, k, v, None, shape, states)[0].transpose(0, 1)

    def _following(self, number: int, index: int) -> Iterator[LayerCache]:
        """Yield the caches that attend next, up to the same segment of the next layer.

        Of decoding segments only the next one is included, because the pages of each are many.
        """
        decoding = 0
        for place in range(number + 1, number + 1 + len(self.segments)):
            further, n = divmod(place, len(self.segments))
            segment = self.segments[n]
            decoding += segment.decoding
            if index + further == len(segment.layer_caches) or decoding > 1:
                return
            yield segment.layer_caches[index + further]


def _growth(segments: Sequence[Segment]) -> Pages:
    """Return the pages that new tokens may take in all layers."""
    need: Counter[Pool] = Counter()
    for segment in segments:
        if segment.batch_cache is None or segment.batch_cache.tier is None:
            continue
        for layer_cache in segment.layer_caches:
            if segment.decoding:
                need.update(layer_cache.pages_for_step())
            elif layer_cache.table is not None:
                need[layer_cache.table.pool] += layer_cache.pages_for(segment.end - segment.begin)
    return dict(need)


def adapted_rows(segments: Sequence[Segment]) -> list[tuple[Adapter, Rows]]:
    """Return the adapters of the segments' gates, and the rows that each acts on."""
    found: dict[Adapter, list[slice]] = {}
    for segment in segments:
        gates = segment.layer_caches[0].policy.gates if segment.layer_caches else None
        if gates is not None and gates.adapter is not None:
            found.setdefault(gates.adapter, []).append(slice(segment.begin, segment.end))
    return list(found.items())


class ShapeWatch:
    """Recorder of the shapes of keys and values, without their content.

    Args:
        segments: Segments of the pass, where modules run segment by segment.
    """

    def __init__(self, segments: Sequence[Segment] = ()) -> None:
        self.segments = segments
        self.key_shapes: dict[int, tuple[int, int, int]] = {}
        self.shapes: dict[int, AttentionShape] = {}

    def attend(self, index: int, q: Tensor, k: Tensor, v: Tensor, shape: AttentionShape) -> Tensor:
        self._note(index, k, v, shape)
        return q.new_zeros(*q.shape[:3], v.shape[3])

    def watching(self, rows: LayerAttend) -> LayerAttend:
        """Return the same attention by rows, with a record of its shapes."""

        def attend(index: int, q: Tensor, k: Tensor, v: Tensor, shape: AttentionShape) -> Tensor:
            self._note(index, k, v, shape)
            return rows(index, q, k, v, shape)

        return attend

    def _note(self, index: int, k: Tensor, v: Tensor, shape: AttentionShape) -> None:
        """Record the shapes of keys and values, whose KV heads are dimension 1."""
        self.key_shapes[index] = (k.shape[1], k.shape[-1], v.shape[-1])
        self.shapes[index] = shape

    def attend_shared(self, index: int, q: Tensor, value_dim: int, shape: AttentionShape) -> Tensor:
        return q.new_zeros(*q.shape[:3], value_dim)


class FunctionAttention:
    """Attention by a function of rows."""

    def __init__(self, rows: LayerAttend) -> None:
        self._rows = rows

    def attend(self, index: int, q: Tensor, k: Tensor, v: Tensor, shape: AttentionShape) -> Tensor:
        q, k, v = (t[0].transpose(0, 1) for t in (q, k, v))
        return self._rows(index, q, k, v, shape)[None].transpose(1, 2)

    def attend_shared(self, index: int, q: Tensor, value_dim: int, shape: AttentionShape) -> Tensor:
        """Refuse layers without keys.

        Raises:
            UnsupportedModelError: always: only families whose layers all have keys run lean.
        """
        raise UnsupportedModelError(f"a layer reads the keys of layer {index}, which rows outside the modules do not")


Served = SegmentedAttention | ShapeWatch | FunctionAttention


class _PackedLayer(PassLayer):  # type: ignore[no-untyped-call]
    """One layer of a packed pass: hands keys to attention, which returns them with queries.

    Args:
        index: Number of the layer in the model.
        nth: Its number among those with attention.
        served: Attention of the pass.
        readers: Numbers of the layers that have no keys of their own and read this one's.
        inputs: What the attention modules read, where a method needs it.
    """

    def __init__(
        self, index: int, nth: int, served: Served, readers: frozenset[int], inputs: AttentionInputs | None
    ) -> None:
        super().__init__()
        self.index = index
        self.readers = readers
        self._value_dim = 0
        self._nth = nth
        self._served = served
        self._inputs = inputs

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self._value_dim = value_states.shape[-1]
        return tag(key_states, self), value_states

    def attend_shared(self, q: Tensor, shape: AttentionShape) -> Tensor:
        """See `SegmentedAttention.attend_shared`."""
        return self._served.attend_shared(self._nth, q, self._value_dim, shape)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, shape: AttentionShape) -> Tensor:
        """See `SegmentedAttention.attend`. The mask of the row says nothing: no row is a pad."""
        if q.shape[0] != 1:
            raise CacheMismatchError(f"a packed pass has one row of tokens, and a layer brought {q.shape[0]}")
        if self._inputs is not None and isinstance(self._served, SegmentedAttention):
            self._served.give_hidden(self._nth, self._inputs.take(self._nth)[0])
        return self._served.attend(self._nth, q, k, v, shape)


class PackedPass(Cache):
    """Cache of one packed pass.

    Args:
        served: Attention of the pass.
        readers: Numbers of the layers with attention -> of those that read their keys.
        depth: Layers of all kinds.
        inputs: What the attention modules read, where a method needs it.
    """

    def __init__(
        self, served: Served, readers: Mapping[int, frozenset[int]], depth: int, inputs: AttentionInputs | None = None
    ) -> None:
        layers: list[Any] = [EmptyLayer() for _ in range(depth)]
        for nth, (number, by) in enumerate(readers.items()):
            layers[number] = _PackedLayer(number, nth, served, by, inputs)
        super().__init__(layers=layers)
        self._served = served

    @property
    def segments(self) -> Sequence[Segment]:
        """Those of all its rows, for modules that run segment by segment."""
        assert isinstance(self._served, SegmentedAttention | ShapeWatch), "only families without states run lean"
        return self._served.segments
