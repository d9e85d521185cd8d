"""MInference: sparse attention patterns of prompts (Jiang et al., NeurIPS 2024, arXiv:2407.02490)."""

import json
from typing import Annotated, Literal

from millpond.errors import OptionError
from millpond.methods import method
from millpond.option_files import FILE, read_file
from millpond.option_ranges import SOME_POSITIONS, Range
from millpond.policy.needs.prompt_patterns import Pattern
from millpond.policy.policy import Policy
from millpond.policy.variants.minference_patterns import BlockSparse, make_pattern
from millpond.policy.variants.sparse_prefill import SparsePrefillPolicy


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
        "a JSON file, per layer a map from query head to [kind, vertical, slash]; "
        "`millpond.hf.offline.head_patterns` finds one",
        FILE,
    ] = "",
) -> Policy:
    """Read prompts with sparse attention; store everything, and attend to all of it while decoding.

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
    chosen = BlockSparse(blocks) if pattern == "block_sparse" else make_pattern(pattern, vertical, slash, last)
    return SparsePrefillPolicy(pattern=chosen.scaled(ratio), table=_table(patterns, last, ratio) if patterns else {})


def _table(path: str, last: int, ratio: float) -> dict[tuple[int, int], Pattern]:
    """By layer and query head."""
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
