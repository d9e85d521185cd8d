"""Tables of heads with rules of their own, in the middle of a text."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from millpond.cache.pages.page_table import PageTable
from millpond.cache.pages.pool import PagePool
from millpond.cache.state.token_ids import TokenIds
from millpond.kernels import ops
from millpond.methods import METHODS
from millpond.policy.head_rules import HeadRulesPolicy
from tests.helpers.kernels.args import write_args

N_SEQ, N_HEADS, SEEN = 3, 4, 90


def policy() -> HeadRulesPolicy:
    built = METHODS.get("fastgen")(special="90;91", punctuation="80;81;82", sinks=2)
    assert isinstance(built, HeadRulesPolicy)
    return built


def filled(
    draw: torch.Generator, masses: bool, budget: int, device: torch.device | str = "cpu"
) -> tuple[PageTable, TokenIds]:
    """A batch in the middle of its text: ragged heads in any order, scores that often tie, rules of all kinds."""
    pool = PagePool(8, 4, torch.bfloat16, device, slots=8, masses=masses)
    table = PageTable(pool, N_SEQ, N_HEADS)
    for s in range(N_SEQ):
        lens = torch.randint(1, 60, (N_HEADS,), generator=draw).numpy().astype(np.int32)
        table.reserve(s, lens)
        width = int(lens.max())
        older = torch.stack([torch.randperm(SEEN - 1, generator=draw)[:width] for _ in range(N_HEADS)])
        older[torch.arange(N_HEADS), torch.from_numpy(lens).long() - 1] = SEEN - 1  # the new token, in the last slot
        positions, lens_now = older.int(), torch.from_numpy(lens)
        index = torch.arange(width, dtype=torch.int32).expand(N_HEADS, -1)
        entries = (
            lens_now * 0,
            lens_now,
            index,
            torch.randn(N_HEADS, width, 8, generator=draw),
            torch.randn(N_HEADS, width, 4, generator=draw),
            positions,
            torch.randint(0, 6, (N_HEADS, width), generator=draw) / 4 - 0.5,
            torch.rand(N_HEADS, width, generator=draw) if masses else None,
        )
        there = (None if part is None else part.to(device) for part in entries)
        ops.write(*write_args(pool.arrays, table.pages[table.rows(s)], *there))
        table.set_lengths(s, lens)
        table.set_budget(s, np.full(N_HEADS, budget, dtype=np.int32), 0)
        table.set_head_rules(s, torch.randint(0, 5, (N_HEADS,), generator=draw).numpy(), 20 + s)
    tokens = TokenIds()
    ids = torch.randint(70, 95, (N_SEQ, SEEN), generator=draw).to(device)
    tokens.expect(ids, 0)
    tokens.take(0, torch.arange(SEEN, device=device).int().expand(N_SEQ, -1), SEEN)
    return table, tokens


def held(table: PageTable) -> list[Tensor]:
    dense = ops.read(table.regions, int(table.lengths().max()))
    return [part for part in dense if part is not None]
