"""Arguments of the attention of a few queries to all entries of many regions, which is read in their pages."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from torch import Tensor

from millpond.errors import OptionError
from millpond.kernels.args import AttentionShape, OfQueries, PaddedEntries, PageRegions, WindowSignalArgs
from millpond.kernels.decode_rules import Reduce


@dataclass(frozen=True, slots=True)
class PagedWindowArgs(OfQueries):
    """A few queries w of one sequence in each of R regions.

    The regions are, for instance, those of all KV heads of several layers.

    Attributes:
        q: (R, group, w, key_dim), the queries of the heads that read each region.
        q_pos: (w,) int32, of all regions.
        regions: The R regions of the entries, in any order in each, in plain pages; only read.
        width: Columns of the result, at least the most entries of a region.
        shape: Settings of the attention; `sink_logits` are (R * group,) here, group after group.
        reduce: Reduction of the query heads of a group.

    Raises:
        OptionError: shapes that do not belong together.
    """

    q: Tensor
    q_pos: Tensor
    regions: PageRegions
    width: int
    shape: AttentionShape
    reduce: Reduce = Reduce.MEAN

    def __post_init__(self) -> None:
        pages, table, lens = self.regions.parts
        n_queries = self.q_pos.shape[0]
        wanted = f"({len(table)} regions, group, {n_queries} positions, key_dim {pages.key_dim})"
        if self.q.ndim != 4 or (self.q.shape[0], *self.q.shape[2:]) != (len(table), n_queries, pages.key_dim):
            raise OptionError(f"queries {tuple(self.q.shape)} are not {wanted}; stack those of all regions")
        if len(lens) != len(table):
            raise OptionError(f"{len(lens)} lengths of {len(table)} regions; give one for each row of the table")
        sinks, n_heads = self.shape.sink_logits, self.q.shape[0] * self.q.shape[1]
        if sinks is not None and sinks.shape != (n_heads,):
            raise OptionError(
                f"sink logits {tuple(sinks.shape)} are not one for each of {n_heads} query heads; concatenate those of "
                "all regions"
            )

    def parts(self, n_bytes: int) -> Iterator[PagedWindowArgs]:
        """Yield the same of some regions at a time.

        Their keys and values are `n_bytes` at most, or those of one region.
        """
        (pages, table, lens), sinks = self.regions.parts, self.shape.sink_logits
        row_bytes = self.width * (pages.key_dim + pages.value_dim) * pages.dtype.itemsize
        together, group = max(n_bytes // max(row_bytes, 1), 1), self.q.shape[1]
        for begin in range(0, len(table), together):
            rows = slice(begin, begin + together)
            own = None if sinks is None else sinks[begin * group : (begin + together) * group]
            regions, shape = PageRegions(pages, table[rows], lens[rows]), replace(self.shape, sink_logits=own)
            yield replace(self, q=self.q[rows], regions=regions, shape=shape)

    def over(self, entries: PaddedEntries) -> WindowSignalArgs:
        """Return the same over `entries` that were read out of the regions."""
        q, masses = self.q.flatten(0, 1), entries.log_masses
        return WindowSignalArgs(q, entries.keys, self.q_pos, entries.positions, self.shape, self.reduce, masses)
