"""The caches of all layers for a batch of sequences, which are joined, selected and swapped together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import chain
from typing import NamedTuple

import numpy as np
from torch import Tensor

from millpond.cache.coded.kept_coder import KeptCodes
from millpond.cache.coded.kept_swap import KeptSequences, KeptSwapCoding
from millpond.cache.coded.swap import CodedSequences, SwapCoding
from millpond.cache.coded.text import CodedText
from millpond.cache.layer.joint_plans import run_plans
from millpond.cache.layer.layer_cache import LayerCache
from millpond.cache.pages import table_bytes
from millpond.cache.pages.page_table import PageTable
from millpond.cache.pages.ref_counted_pool import Pool
from millpond.cache.state.attention_samples import AttentionSamples, LayerSamples
from millpond.cache.state.positions import PositionTracker
from millpond.cache.state.prompt_sums import LayerSums
from millpond.cache.state.recurrent_states import RecurrentStates
from millpond.cache.swap import Content, SwapFile, SwapFiles, SwappedPages, copy_out, parts_of, release_all, restore
from millpond.cache.tiered.disk_tier import DiskTier
from millpond.cache.types import RotaryEmbedding
from millpond.errors import DataError
from millpond.prompt_marks import PromptMarks, Span

#: How many pages of each pool; of `StateSlots`, how many sequences.
Pages = dict[Pool, int]
#: Layers whose pages are read from a disk while one plans, which takes less time than the way of its pages.
READ_AHEAD = 4


class CacheSizes(NamedTuple):
    """Sizes of the caches of all layers at one moment."""

    entries: np.ndarray  #: (n_seq,) entries held in the pool, of all layers and heads together
    kv_bytes: np.ndarray  #: (n_seq,) bytes of keys and values in the pages that they need
    used_bytes: np.ndarray  #: (n_seq,) those of `kv_bytes` in slots that hold an entry


class BatchCache:
    """The caches of all layers for a batch of sequences that read or decode in step.

    It holds pages until it is cleared.

    Args:
        layer_caches: New caches, one per layer with attention.
        tracker: Positions of the sequences, shared by the layers.
        before_plan: Function that is called when the prompt is about to be planned.
        states: States of the layers that hold some, in a hybrid.
        tier: Tier of the layers whose pages are on a disk between passes; None if all stay in memory.
        rotations: Rotary embedding of each layer's keys, None for one whose keys have no rotary position; empty if gaps
            never close.

    Attributes:
        reading: Whether the prompt is still being read: nothing is planned, and a pass of one token belongs to it.
        samples: Samples of the attention of its only prompt, for a storage codec; None: none are taken.
    """

    def __init__(
        self,
        layer_caches: Sequence[LayerCache],
        tracker: PositionTracker,
        before_plan: Callable[[], None] = lambda: None,
        states: RecurrentStates | None = None,
        tier: DiskTier | None = None,
        rotations: Sequence[RotaryEmbedding | None] = (),
    ) -> None:
        self._rotations = rotations
        self.samples: AttentionSamples | None = None
        self.layers = list(layer_caches)
        self.tier = tier
        self.tracker = tracker
        self.states = states
        self._before_plan = before_plan
        self._swapped: list[list[SwappedPages]] | None = None
        self._swapped_states: tuple[int, Content] = (0, ())  # of how many sequences
        self._file: SwapFile | None = None  # where the content of what is carried lies; None: in memory
        self._coded: CodedSequences | KeptSequences | None = None  # or the codes of this content

    @property
    def n_seq(self) -> int:
        """Sequences held."""
        return self.tracker.n_seq

    @property
    def reading(self) -> bool:
        return self.layers[0].reading

    @reading.setter
    def reading(self, value: bool) -> None:
        for layer_cache in self.layers:
            layer_cache.reading = value

    def sample(self) -> None:
        """Take samples of the attention of the prompt that begins."""
        self.samples = AttentionSamples([LayerSamples() for _ in self.layers])
        for layer_cache, own in zip(self.layers, self.samples.layers, strict=True):
            layer_cache.attention.samples = own

    def run_plans(self) -> None:
        """End the prompt: every layer plans which entries it keeps."""
        self.reading = False
        self._before_plan()
        due = [layer_cache for layer_cache in self.layers if layer_cache.changes_at_prompt_end]
        due = run_plans(due) if self.tier is None else due
        for n, layer_cache in enumerate(due):
            with self.in_memory(layer_cache, due[n + 1 : n + 1 + READ_AHEAD]):
                layer_cache.run_plans()
        for layer_cache in due:  # before the sequences join others
            layer_cache.planner.settle()

    def in_memory(
        self, layer_cache: LayerCache, then: Iterable[LayerCache] = (), growth: Pages | None = None
    ) -> AbstractContextManager[None]:
        """Keep the pages of a layer in memory while it uses them, see `DiskTier.in_memory`."""
        return nullcontext() if self.tier is None else self.tier.in_memory(layer_cache, then, growth)

    def pop_failed(self) -> dict[int, DataError]:
        """Return errors of sequences whose pages failed to be read or written since the last call."""
        failed: dict[int, DataError] = {}
        for layer_cache in [] if self.tier is None else self.layers:
            failed, layer_cache.failed = {**layer_cache.failed, **failed}, {}
        return failed

    def mark(self, marks: PromptMarks) -> None:
        """Mark spans of the one text that is read, or begins next, in every layer."""
        if self.n_seq:
            self.tracker.marks.add(marks, 0)
        else:
            self.tracker.marks.expect(marks)

    def drop_spans(self, sequence: int, spans: Sequence[Span]) -> None:
        """Evict entries in spans of the text of a sequence from every head; later ones stay.

        Raises:
            PoolFullError: no room for copies of pages that others hold; the sequence can only be forgotten.
        """
        for layer_cache in self.layers if spans else ():
            with self.in_memory(layer_cache):
                layer_cache.drop_spans(sequence, spans)
        self.tracker.marks.dropped.add(spans, sequence)

    def begin_with(
        self, tables: Sequence[PageTable], ids: Tensor | None = None, sums: Sequence[LayerSums] | None = None
    ) -> None:
        """Begin one sequence with the tokens of a prompt that these tables hold, one per layer.

        Args:
            tables: Table of each layer.
            ids: Tokens (n,), which a policy may need.
            sums: Sums over their queries, see `sums`; None if none are needed.
        """
        columns = int(tables[0].lengths()[0, 0])
        each: Sequence[LayerSums | None] = sums or [None] * len(tables)
        for layer_cache, table, own in zip(self.layers, tables, each, strict=True):
            layer_cache.begin_with(table, columns, own)
        if self.tracker.tokens is not None and ids is not None:
            self.tracker.adopt(ids[None, :columns])
        else:
            self.tracker.begin_with(columns)

    def sums(self, begin: int) -> list[LayerSums]:
        """Return the policy's sums over the queries of the only sequence, see `LayerCache.sums`."""
        return [layer_cache.sums(begin) for layer_cache in self.layers]

    # ------------------------------------------------------------------ the batch

    def begin(self, ids: Tensor) -> None:
        """Begin a pass with these tokens (n_seq, columns)."""
        self.tracker.begin_pass(ids)

    def join(self, other: BatchCache) -> None:
        """Take the sequences of another batch cache of the same kind, and empty it."""
        for layer_cache, joining in zip(self.layers, other.layers, strict=True):
            layer_cache.join(joining)
        if self.states is not None and other.states is not None:
            self.states.join(other.states)
        self.tracker.join(other.tracker)
        other.tracker.reset()

    def select(self, sequences: list[int]) -> None:
        """Keep the given sequences, in this order; for none, hold nothing."""
        if sequences == list(range(self.n_seq)):
            return
        if not sequences:
            self.clear()
            return
        for layer_cache in self.layers:
            layer_cache.select(sequences)
        if self.states is not None:
            self.states.select(sequences)
        self.tracker.select(sequences)

    def part(self, sequences: list[int], into: BatchCache) -> None:
        """Move some sequences to `into`, an empty batch cache of the same kind."""
        self.copy_to(sequences, into)
        self.select([s for s in range(self.n_seq) if s not in set(sequences)])

    def copy_to(self, sequences: list[int], into: BatchCache) -> None:
        """Let `into`, an empty batch cache of the same kind, hold some of the sequences too.

        A page is copied when it is written. States of a hybrid are copied.
        """
        for layer_cache, other in zip(self.layers, into.layers, strict=True):
            layer_cache.copy_to(sequences, other)
        if self.states is not None and into.states is not None:
            self.states.part(sequences, into.states)
        into.tracker.join(self.tracker.copy(sequences))

    def clear(self) -> None:
        """Release every page and forget every sequence."""
        for layer_cache in self.layers:
            layer_cache.reset()
        if self.states is not None:
            self.states.reset()
        self.tracker.reset()
        self._forget_swapped()

    # ------------------------------------------------------------------ positions

    def close_gaps(self, sequence: int) -> None:
        """Give the entries of a sequence consecutive positions, after which its text continues.

        All layers have planned. A key keeps its order in its head; heads with fewer entries end at the same position.

        Raises:
            PoolFullError: no room for copies of pages that others hold.
        """
        end = max(layer_cache.least_end(sequence) for layer_cache in self.layers)
        for layer_cache, rotary in zip(self.layers, self._rotations, strict=True):
            layer_cache.close_gaps(sequence, end, rotary)
        self.tracker.close(sequence, end)

    # ------------------------------------------------------------------ room

    def pages_for_step(self) -> Pages:
        """Return the most pages that the next decoding step may take of each pool."""
        return self._pages_of_pass([layer_cache.pages_for_step() for layer_cache in self.layers])

    def pages_for(self, n_tokens: int) -> Pages:
        """Return pages that the next `n_tokens` of the prompt take, if it has begun."""
        return self._pages_of_pass(
            [
                {} if layer_cache.table is None else {layer_cache.table.pool: layer_cache.pages_for(n_tokens)}
                for layer_cache in self.layers
            ]
        )

    def _pages_of_pass(self, growth: Sequence[Pages]) -> Pages:
        """Return pages of a pass in which each layer grows; on a disk, of the largest one."""
        need: Counter[Pool] = Counter()
        most: Pages = {}
        for layer_cache, more in zip(self.layers, growth, strict=True):
            if self.tier is None or not self.tier.is_on_disk(layer_cache):
                need.update(more)
            else:
                in_memory, stays = self.tier.window(layer_cache, more)
                need.update(stays)
                most = {pool: max(most.get(pool, 0), in_memory.get(pool, 0)) for pool in {**most, **in_memory}}
        need.update(most)
        return dict(need)

    # ------------------------------------------------------------------ out of the pool and back

    @property
    def is_swapped_out(self) -> bool:
        """Whether the pages are outside the pool."""
        return self._swapped is not None

    @property
    def is_coded(self) -> bool:
        """Whether what was swapped out is in codes."""
        return self._coded is not None

    def swap_out(self, files: SwapFiles | None = None, coding: SwapCoding | KeptSwapCoding | None = None) -> None:
        """Copy all pages and states to the host's memory, or to a file, and release them.

        Args:
            files: Folder of the file; None: the host's memory.
            coding: How entries are coded, in place of a file; those that have no codes are copied.

        Raises:
            DataError: the file cannot be written; nothing was changed.
        """
        tables, states = self._tables(), self.states
        n_states, of_states = (0, ()) if states is None else (states.n_seq, states.copy_out())
        self._coded = None if coding is None else coding.of(tables)
        if self._coded is not None:
            content: list[list[Content]] = [[()] * len(parts_of(table)) for table in tables]
        else:
            content = [copy_out(table) for table in tables]
        if files is not None:
            self._file = files.write([*content, [of_states]])
            content, of_states = [[()] * len(parts) for parts in content], ()
        self._swapped = [release_all(table, parts) for table, parts in zip(tables, content, strict=True)]
        self._swapped_states = n_states, of_states
        if states is not None:
            states.drop()

    def prepare_swap_in(self, *, wait: bool) -> bool:
        """Begin to decode what was swapped out in codes, and return whether that is done.

        Args:
            wait: Wait until it is.
        """
        return self._coded is None or self._coded.prepare(wait=wait)

    @property
    def swapped_bytes(self) -> int:
        """Bytes on the host of what was swapped out there."""
        of_states = sum(part.nbytes for part in self._swapped_states[1])
        pages = sum(part.nbytes for part in chain.from_iterable(self._swapped or []))
        return of_states + pages + (0 if self._coded is None else self._coded.nbytes)

    def swap_in(self) -> Sequence[CodedText | KeptCodes] | None:
        """Read the pages and states again. Ask `pages_to_swap_in` for room first.

        Returns:
            For each sequence what later codes go on from; None: they were not coded.

        Raises:
            DataError: the file with them is gone or broken, or codes are; they can only be forgotten.
        """
        assert self._swapped is not None, "only swapped-out pages can be swapped in"
        _, of_states = self._swapped_states
        if self._file is not None:
            *pages, (of_states,) = self._file.read()
            self._swapped = [
                [replace(part, arrays=arrays) for part, arrays in zip(parts, contents, strict=True)]
                for parts, contents in zip(self._swapped, pages, strict=True)
            ]
        codes: Sequence[CodedText | KeptCodes] | None = None
        if self._coded is not None:
            self._coded.decoded()  # so that an error leaves no pages
        tables = self._tables()
        for table, carried in zip(tables, self._swapped, strict=True):
            restore(table, carried)
        if self._coded is not None:
            codes = self._coded.write(tables)
        if self.states is not None:
            self.states.put_back(of_states)
        self._forget_swapped()
        return codes

    def pages_to_swap_in(self) -> Pages:
        """Return pages of each pool that `swap_in` takes, and sequences whose states it restores."""
        need: Counter[Pool] = Counter()
        for part in chain.from_iterable(self._swapped or []):
            need[part.pool] += part.n_pages
        if self.states is not None and self.states.slots is not None:
            need[self.states.slots] += self._swapped_states[0]
        return dict(need)

    def _tables(self) -> list[PageTable]:
        """Tables whose pages are in their pool."""
        return [
            layer_cache.table
            for layer_cache in self.layers
            if layer_cache.table is not None and not layer_cache.table.is_offloaded
        ]

    def _forget_swapped(self) -> None:
        if self._file is not None:
            self._file.remove()
        self._swapped = self._file = self._coded = None
        self._swapped_states = 0, ()

    # ------------------------------------------------------------------ figures

    def sizes(self) -> Callable[[], CacheSizes]:
        """Return a function that returns the sizes of the caches now.

        Only its call may wait for a device.
        """
        tables = [table for layer_cache in self.layers if (table := layer_cache.table) is not None]
        if not any(table.is_behind for table in tables):
            held = self.held()
            now = CacheSizes(held.sum((0, 2)), self.kv_bytes(held), self.used_bytes(held))
            return lambda: now
        coming = table_bytes.SizesToCome(tables)

        def read() -> CacheSizes:
            found = coming.wait()
            entries = np.asarray(sum(sizes.entries.sum(1, dtype=np.int64) for sizes in found))
            kv_bytes, used = sum(sizes.kv_bytes for sizes in found), sum(sizes.used_bytes for sizes in found)
            return CacheSizes(entries, np.asarray(kv_bytes), np.asarray(used))

        return read

    def held(self) -> np.ndarray:
        """Return entries held in the pool, (n_layers, n_seq, n_kv_heads).

        Heads that a layer lacks count 0.
        """
        stored = [layer_cache.in_pool for layer_cache in self.layers]
        heads = max((s.shape[1] for s in stored), default=0)
        counts = np.zeros((len(stored), self.n_seq, heads), dtype=np.int64)
        for layer, entries in enumerate(stored):
            counts[layer, : entries.shape[0], : entries.shape[1]] = entries
        return counts

    def outside(self) -> np.ndarray:
        """Return entries held outside of the pool, of all layers and heads together, (n_seq,)."""
        counts = np.zeros(self.n_seq, dtype=np.int64)
        for layer_cache in self.layers:
            selective = layer_cache.sequence_state.selective
            if selective is not None and layer_cache.table is not None:
                counts += selective.entries_outside(self.n_seq) * layer_cache.table.n_kv_heads
        return counts

    def kv_bytes(self, held: np.ndarray) -> np.ndarray:
        """Return bytes of keys and values in the pages that `held` entries need, (n_seq,).

        held: see `held`.
        """
        tables = [layer_cache.table for layer_cache in self.layers]
        slots = {0 if table is None or table.quantized is not None else table.pool.slots for table in tables}
        if len(slots) == 1 and 0 not in slots:  # all at once: called at every step
            page_bytes = np.array([table.pool.kv_bytes_per_page for table in tables if table is not None])
            nbytes: np.ndarray = page_bytes @ (-(-held // slots.pop())).sum(2)
        else:
            nbytes = np.array([table_bytes.kv_bytes(table) for table in tables if table is not None]).sum(0)
        return nbytes

    def used_bytes(self, held: np.ndarray) -> np.ndarray:
        """Return those of `kv_bytes` in slots that hold an entry, (n_seq,)."""
        tables = [table for layer_cache in self.layers if (table := layer_cache.table) is not None]
        if not tables or any(table.quantized is not None for table in tables):
            return np.asarray(
                sum((table_bytes.used_bytes(table) for table in tables), np.zeros(self.n_seq, dtype=np.int64))
            )
        slot_bytes = np.array([table.pool.kv_bytes_per_page // table.pool.slots for table in tables])
        nbytes: np.ndarray = slot_bytes @ held.sum(2)
        return nbytes
