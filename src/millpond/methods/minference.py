"""MInference: sparse attention patterns of prompts (Jiang et al., NeurIPS 2024, arXiv:2407.02490)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from millpond.errors import CacheMismatchError, OptionError
from millpond.kernels.eager.softmax import wide
from millpond.methods import method
from millpond.option_files import FILE, read_file
from millpond.option_ranges import SOME_POSITIONS, Range
from millpond.policy.needs import BLOCK, HeadPrompt, Look, Needs, Pattern
from millpond.policy.policy import Policy


@dataclass(frozen=True, slots=True)
class SparsePrefillPolicy(Policy):
    """Policy that stores everything; queries of a prompt attend to patterns of it.

    Decoding attends to everything.

    Attributes:
        pattern: Pattern of every head that the table does not name.
        table: Patterns of other heads, by layer and query head.
    """

    pattern: Pattern = field(kw_only=True)
    table: Mapping[tuple[int, int], Pattern] = field(default_factory=dict)

    @property
    def needs(self) -> Needs:
        return Needs(whole_prompt=True, prompt_patterns=self)

    def patterns(self, layer: int, n_heads: int) -> list[Pattern]:
        """Return the pattern of each query head of a layer.

        Raises:
            CacheMismatchError: the table names a head that there is not.
        """
        beyond = [head for at, head in self.table if at == layer and head >= n_heads]
        if beyond:
            raise CacheMismatchError(
                f"layer {layer} has {n_heads} query heads; the table of patterns names head {max(beyond)}: take one of "
                "this model"
            )
        return [self.table.get((layer, head), self.pattern) for head in range(n_heads)]


def make_pattern(kind: str, first: int, second: int, last: int = 64) -> Pattern:
    """Return a pattern by its name and its two numbers.

    They are those of a table of patterns; of blocks only the first one counts.

    Raises:
        OptionError: no such kind, or a number below 1.
    """
    match kind:
        case "vertical_slash" | "vertical_and_slash":
            return VerticalSlash(first, second, last=last)
        case "a_shape" | "stream_llm":
            return AShape(first, second)
        case "block_sparse":
            return BlockSparse(first)
    raise OptionError(f"pattern {kind!r} is none of vertical_slash, a_shape and block_sparse")


@dataclass(frozen=True, slots=True)
class AShape:
    """Pattern of the first entries and the newest ones."""

    first: int = 100
    width: int = 800

    def __post_init__(self) -> None:
        _check(first=self.first, width=self.width)

    @property
    def near(self) -> tuple[int, int] | None:
        return self.first, self.width

    def covers(self, n: int) -> bool:
        return max(self.first, self.width) >= n

    def scaled(self, ratio: float) -> AShape:
        return AShape(_times(self.first, ratio), _times(self.width, ratio))

    def look(self, prompt: HeadPrompt) -> Look:
        def columns(begin: int, end: int) -> Tensor:
            first = min(self.first, end)
            oldest = max(begin - self.width + 1, first)
            return torch.cat([torch.arange(a, b, device=prompt.q.device) for a, b in ((0, first), (oldest, end))])

        return columns


@dataclass(frozen=True, slots=True)
class VerticalSlash:
    """Pattern of the columns and the diagonals that the last queries attend to most.

    c_j = sum_i A_ij and d_o = sum_i A_i,i-o over the last queries i; the best columns j and distances o are looked at
    by all. A block of rows attends to every column that a chosen diagonal crosses in it.

    Attributes:
        vertical: Number of columns.
        slash: Number of diagonals.
        last: Queries that choose.
        first: First columns that are always chosen, as far as they exist.
        nearest: Nearest diagonals that are always chosen, as far as they exist.
    """

    vertical: int = 1000
    slash: int = 6096
    last: int = 64
    first: int = 30
    nearest: int = 100

    def __post_init__(self) -> None:
        _check(vertical=self.vertical, slash=self.slash, last=self.last)

    @property
    def near(self) -> tuple[int, int] | None:
        return None

    def covers(self, n: int) -> bool:
        return max(self.vertical, self.slash) >= n

    def scaled(self, ratio: float) -> VerticalSlash:
        return replace(self, vertical=_times(self.vertical, ratio), slash=_times(self.slash, ratio))

    def look(self, prompt: HeadPrompt) -> Look:
        columns, distances = self.choose(prompt)
        below = F.pad(distances.cumsum(0), (1, 0))  # chosen distances under each number

        def look(begin: int, end: int) -> Tensor:
            # position j lies end - j .. begin - j away: some distance between them, both included, is chosen
            crossed = below[1 : end + 1].flip(0) - F.pad(below[1 : begin + 1].flip(0), (0, end - begin))
            return (columns[:end] | (crossed > 0)).nonzero()[:, 0]

        return look

    def choose(self, prompt: HeadPrompt) -> tuple[Tensor, Tensor]:
        """Return (N,) bool of columns, and (N,) bool of distances of a query to what it sees."""
        p = prompt.last_rows(min(self.last, len(prompt.q)))
        n_rows, n = p.shape
        padded = F.pad(p.flip(1), (0, n_rows))  # row r: distance o stands in column n_rows - 1 - r + o
        diagonals = padded.as_strided((n_rows, n), (n + n_rows - 1, 1), n_rows - 1).sum(0)
        return _best(p.sum(0), self.vertical, self.first), _best(diagonals, self.slash, self.nearest)


@dataclass(frozen=True, slots=True)
class BlockSparse:
    """Blocks of entries whose mean key is most like the mean query of a block of rows.

    The newest block is always among them.

    Attributes:
        blocks: Blocks of BLOCK entries that a block of rows attends to.
    """

    blocks: int = 100

    def __post_init__(self) -> None:
        _check(blocks=self.blocks)

    @property
    def near(self) -> tuple[int, int] | None:
        return None

    def covers(self, n: int) -> bool:
        return self.blocks * BLOCK >= n

    def scaled(self, ratio: float) -> BlockSparse:
        return BlockSparse(_times(self.blocks, ratio))

    def look(self, prompt: HeadPrompt) -> Look:
        kind, n = wide(prompt.q.dtype), len(prompt.k)
        starts = torch.arange(0, n, BLOCK, device=prompt.k.device)
        sizes = (n - starts).clamp(max=BLOCK)
        sums = F.pad(prompt.k.to(kind), (0, 0, 0, -n % BLOCK)).view(len(starts), BLOCK, -1).sum(1)
        means = sums / sizes[:, None]

        def look(begin: int, end: int) -> Tensor:
            rows = prompt.q[begin - prompt.first : end - prompt.first].to(kind).mean(0)
            worth = (means @ rows)[: -(-end // BLOCK)]
            own_block = begin // BLOCK  # in a later turn blocks of rows and of entries need not begin together
            worth[own_block:] = torch.inf
            max_blocks = max(self.blocks, len(worth) - own_block)
            selected = worth.argsort(descending=True, stable=True)[:max_blocks].sort().values
            columns = (starts[selected, None] + torch.arange(BLOCK, device=starts.device)).flatten()
            return columns[columns < end]

        return look


def _check(**numbers: int) -> None:
    for name, number in numbers.items():
        if number < 1:
            raise OptionError(f"{name}={number} must be at least 1")


def _times(number: int, ratio: float) -> int:
    return max(1, round(number * ratio))


def _best(sums: Tensor, n: int, always: int) -> Tensor:
    """Return (N,) bool: the n largest, the first `always` before all others.

    Ties go to the first.
    """
    sums = sums.clone()
    sums[:always] = torch.inf
    return torch.zeros_like(sums).bool().index_fill_(0, sums.argsort(descending=True, stable=True)[:n], True)


@method("minference", paper="arXiv:2407.02490")
def minference(
    pattern: Annotated[
        Literal["vertical_slash", "a_shape", "block_sparse"], "of every head that `patterns` does not name"
    ] = "vertical_slash",
    vertical: Annotated[
        int, "columns of vertical_slash, or first positions of a_shape (the paper: 100)", SOME_POSITIONS
    ] = 1000,
    slash: Annotated[
        int, "diagonals of vertical_slash, or newest positions of a_shape (the paper: 800)", SOME_POSITIONS
    ] = 6096,
    blocks: Annotated[int, "blocks of 64 entries that 64 queries attend to in block_sparse", SOME_POSITIONS] = 100,
    last: Annotated[int, "last queries of the prompt that choose columns and diagonals", Range(1, 256)] = 64,
    ratio: Annotated[float, "factor on all these numbers of entries", Range(0.0, 1000.0, above=True)] = 1.0,
    patterns: Annotated[
        str,
        "a JSON file, per layer a map from query head to [kind, vertical, slash]; `millpond.hf.offline` finds one",
        FILE,
    ] = "",
) -> Policy:
    """Read prompts with sparse attention; store everything, and decode with all of it.

    No memory is saved. Per query head: a_shape sees the first `vertical` and the newest `slash` positions.
    vertical_slash sums the exact attention of the last 64 queries by column and by distance; all queries attend to the
    best `vertical` columns, the first 30 among them, and the best `slash` distances, the nearest 100 among them
    (Algorithm 2). block_sparse compares the mean query of 64 rows with the mean keys of 64 entries (Algorithm 3).
    64 rows attend to every column that a chosen diagonal crosses in them, and nothing else is computed. Texts that the
    numbers cover are attended whole. The official configuration of Llama-3.1-8B is vertical=512, slash=2048.

    Departs from the paper: heads use the kind that the search found for them (the official code turns every kind into
    vertical_slash). block_sparse always includes the rows' own block. Each chunk of a prompt, and each later turn,
    chooses again by its own last queries, so by default all of a prompt is read in one pass. Layers with a sliding
    window attend as ever. Rows attend block by block, head by head, to entries gathered for them: on a CPU this is
    faster than dense attention where few of the pairs of query and entry are computed, and slower where scattered
    diagonals leave little out.
    """
    selected_pattern = (
        BlockSparse(blocks) if pattern == "block_sparse" else make_pattern(pattern, vertical, slash, last)
    )
    return SparsePrefillPolicy(
        pattern=selected_pattern.scaled(ratio), table=_table(patterns, last, ratio) if patterns else {}
    )


def _table(path: str, last: int, ratio: float) -> dict[tuple[int, int], Pattern]:
    """Return the patterns of a file by layer and query head."""
    rule = 'a list of layers, each a map from query head to [kind, number, number]: [{"0": ["a_shape", 100, 800]}]'
    try:
        layers = json.loads(read_file(path))
    except (ValueError, RecursionError) as error:
        raise OptionError(f"minference: patterns={path!r} cannot be read as JSON: {error}") from None
    try:
        if not isinstance(layers, list):
            raise TypeError(f"it is a {type(layers).__name__}")
        return {
            (layer, int(head)): make_pattern(kind, first, second, last).scaled(ratio)
            for layer, heads in enumerate(layers)
            for head, (kind, first, second, *_) in heads.items()
        }
    except (AttributeError, TypeError, ValueError) as error:
        raise OptionError(f"minference: patterns={path!r} must be {rule}; {error}") from None
