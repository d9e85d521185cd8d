"""Cache of one pass over the tokens of many sequences, cut into segments at each attention."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import Cache

from millpond.cache.batch_cache import BatchCache, Pages
from millpond.cache.layer.decode_step import PendingStep
from millpond.cache.layer.layer_cache import LayerCache
from millpond.cache.layer.prompt_pass import PartialSpan
from millpond.cache.pages.ref_counted_pool import Pool
from millpond.cache.state.recurrent_states import RecurrentStates
from millpond.errors import CacheMismatchError, UnsupportedModelError
from millpond.hf.attention import tag
from millpond.hf.layer import EmptyLayer, PassLayer
from millpond.kernels.args import AttentionShape, StepRegions

#: attend(layer, q (N, n_heads, D), k, v (N, n_kv_heads, D), shape) -> (N, n_heads, value_dim).
LayerAttend = Callable[[int, Tensor, Tensor, Tensor, AttentionShape], Tensor]


@dataclass(frozen=True, slots=True)
class Segment:
    """Rows of a pass that go to one batch of caches.

    Attributes:
        cores: of all layers with attention. begin, end: which rows. decoding: one row per sequence; else all rows are
            one sequence's. states: of its sequences, in a hybrid. batch_cache: that the caches are of, where some
            of their pages come for the pass. partial: the rows are some of a run of tokens, of which it knows the
            others.
    """

    cores: Sequence[LayerCache]
    begin: int
    end: int
    decoding: bool
    states: RecurrentStates | None = None
    batch_cache: BatchCache | None = None
    partial: PartialSpan | None = None


class FusedSteps(NamedTuple):
    """A decoding step of all layers."""

    cores: Sequence[LayerCache]
    newest: list[PendingStep]

    def regions(self) -> list[StepRegions]:
        """What the layers meet."""
        return [step.regions() for step in self.newest]

    def end(self, lse: Tensor) -> None:
        """Take note of what happened; `lse`: (layers, S, Hq)."""
        together = lse.device.type != "cpu"
        if together:
            self.cores[0].check_layers(lse)
        for core, step, sums in zip(self.cores, self.newest, [None] * len(lse) if together else lse, strict=True):
            core.end_step(step, sums)


class SegmentedAttention:
    """Attention of each layer, segment by segment.

    Attributes:
        segments: cut all rows of the pass, in order.
    """

    def __init__(self, segments: Sequence[Segment]) -> None:
        self.segments = segments
        self._growth = _growth(segments)

    def rows(self, index: int, q: Tensor, k: Tensor, v: Tensor, shape: AttentionShape) -> Tensor:
        """(T, Hq, value_dim) of q (T, Hq, D), k and v (T, H, D)."""
        if len(self.segments) == 1:
            return self._one(0, index, q, k, v, shape)
        outs = [
            self._one(n, index, q[s.begin : s.end], k[s.begin : s.end], v[s.begin : s.end], shape)
            for n, s in enumerate(self.segments)
        ]
        return torch.cat(outs)

    def attend(self, index: int, q: Tensor, k: Tensor, v: Tensor, shape: AttentionShape) -> Tensor:
        """(1, Hq, T, value_dim) of q (1, Hq, T, D), k and v (1, H, T, D)."""
        q, k, v = (t[0].transpose(0, 1) for t in (q, k, v))
        return self.rows(index, q, k, v, shape)[None].transpose(1, 2)

    def steps(self, shapes: Sequence[AttentionShape]) -> FusedSteps | None:
        """All layers ready for one decoding step, where the segment is one and each layer `is_fusable`."""
        segment = self.segments[0]
        n, cores = segment.end - segment.begin, segment.cores
        if len(self.segments) > 1 or not segment.decoding:
            return None
        if not all(core.is_fusable(n, shape) for core, shape in zip(cores, shapes, strict=True)):
            return None
        return FusedSteps(cores, [core.begin_step(n, shape) for core, shape in zip(cores, shapes, strict=True)])

    def attend_shared(self, index: int, q: Tensor, value_dim: int, shape: AttentionShape) -> Tensor:
        """(1, Hq, T, value_dim): attention of q (1, Hq, T, D) of a later layer to what layer `index` meets."""
        out = q.new_empty(*q.shape[:3], value_dim)
        for segment in self.segments:
            shared = segment.cores[index].shared
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
        """A pass begins, or came to its end: what later layers read is of one pass."""
        for segment in self.segments:
            for core in segment.cores:
                if core.shared is not None:
                    core.shared.clear()

    def _one(self, number: int, index: int, q: Tensor, k: Tensor, v: Tensor, shape: AttentionShape) -> Tensor:
        """(n, Hq, value_dim) of the rows of one segment."""
        segment = self.segments[number]
        core, batch_cache = segment.cores[index], segment.batch_cache
        with (
            nullcontext()
            if batch_cache is None
            else batch_cache.here(core, self._following(number, index), self._growth)
        ):
            if segment.decoding:
                return core.attend_newest(q, k, v, shape)
            if segment.partial is not None:
                q, k, v = (t.transpose(0, 1) for t in (q, k, v))
                return core.attend_partial(q, k, v, segment.partial, shape).transpose(0, 1)
            q, k, v = (t.transpose(0, 1)[None] for t in (q, k, v))
            return core.attend(q, k, v, None, shape)[0].transpose(0, 1)

    def _following(self, number: int, index: int) -> Iterator[LayerCache]:
        """Caches that attend after that of a segment in a layer, up to the same segment of the next layer.

        Of decoding segments only the next one, for the pages of each are many.
        """
        decoding = 0
        for place in range(number + 1, number + 1 + len(self.segments)):
            further, n = divmod(place, len(self.segments))
            segment = self.segments[n]
            decoding += segment.decoding
            if index + further == len(segment.cores) or decoding > 1:
                return
            yield segment.cores[index + further]


def _growth(segments: Sequence[Segment]) -> Pages:
    """Pages that new tokens may take in all layers."""
    need: Counter[Pool] = Counter()
    for segment in segments:
        if segment.batch_cache is None or segment.batch_cache.tier is None:
            continue
        for core in segment.cores:
            if segment.decoding:
                need.update(core.pages_for_step())
            elif core.table is not None:
                need[core.table.pool] += core.pages_for(segment.end - segment.begin)
    return dict(need)


class ShapeWatch:
    """Learns the shapes of keys and values, and keeps none.

    Args:
        segments: of the pass, where modules run segment by segment.
    """

    def __init__(self, segments: Sequence[Segment] = ()) -> None:
        self.segments = segments
        self.found: dict[int, tuple[int, int, int]] = {}
        self.shapes: dict[int, AttentionShape] = {}

    def attend(self, index: int, q: Tensor, k: Tensor, v: Tensor, shape: AttentionShape) -> Tensor:
        self._note(index, k, v, shape)
        return q.new_zeros(*q.shape[:3], v.shape[3])

    def watching(self, rows: LayerAttend) -> LayerAttend:
        """The same attention by rows, whose shapes are noted."""

        def attend(index: int, q: Tensor, k: Tensor, v: Tensor, shape: AttentionShape) -> Tensor:
            self._note(index, k, v, shape)
            return rows(index, q, k, v, shape)

        return attend

    def _note(self, index: int, k: Tensor, v: Tensor, shape: AttentionShape) -> None:
        """k, v: KV heads are dimension 1, in rows and in batches."""
        self.found[index] = (k.shape[1], k.shape[-1], v.shape[-1])
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
        """
        Raises:
            UnsupportedModelError: always: only families whose layers all have keys run lean.
        """
        raise UnsupportedModelError(f"a layer reads the keys of layer {index}, which rows outside the modules do not")


Served = SegmentedAttention | ShapeWatch | FunctionAttention


class _PackedLayer(PassLayer):  # type: ignore[no-untyped-call]
    """One layer of a packed pass: hands keys to the attention function, which brings them back with the queries.

    Args:
        index: number of the layer in the model. nth: its number among those with attention. readers: numbers of the
            layers that have no keys of their own and read this one's.
    """

    def __init__(self, index: int, nth: int, served: Served, readers: frozenset[int]) -> None:
        super().__init__()
        self.index = index
        self.readers = readers
        self._value_dim = 0
        self._nth = nth
        self._served = served

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
        return self._served.attend(self._nth, q, k, v, shape)


class PackedPass(Cache):
    """The cache of one packed pass.

    Args:
        readers: numbers of the layers with attention -> of those that read their keys. depth: layers of all kinds.
    """

    def __init__(self, served: Served, readers: Mapping[int, frozenset[int]], depth: int) -> None:
        layers: list[Any] = [EmptyLayer() for _ in range(depth)]
        for nth, (number, by) in enumerate(readers.items()):
            layers[number] = _PackedLayer(number, nth, served, by)
        super().__init__(layers=layers)
        self._served = served

    @property
    def segments(self) -> Sequence[Segment]:
        """Those of all its rows, for modules that run segment by segment."""
        assert isinstance(self._served, SegmentedAttention | ShapeWatch), "only families without states run lean"
        return self._served.segments
