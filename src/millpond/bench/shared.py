"""How fast decode attention is where sequences share a prefix: in two phases, beside each reading everything itself."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from millpond.bench.kernels import DecodeSetup, Row, time_in_turns
from millpond.kernels import ops
from millpond.kernels.rules import KEEP_ALL

BATCH, LENGTH = 32, 2048
#: KV heads, query heads of each, head_dim: a cache without groups, as ChunkAttention's kernels have it, and one with.
HEADS = {"MHA, 8 heads of 128": (8, 1, 128), "GQA 4:1, 4 heads of 64": (4, 4, 64)}
#: Entries of each sequence that all share.
SHARED = (0, LENGTH // 2, LENGTH)


def _calls(setup: DecodeSetup) -> dict[str, Callable[[], object]]:
    pages, table = setup.fill()
    lens = setup.region_lens()
    q = torch.randn(setup.n_seq, setup.n_kv_heads * setup.group, setup.dim).to(setup.dtype)
    new = torch.randn(setup.n_seq, setup.n_kv_heads, setup.dim).to(setup.dtype)
    recent, q_pos, scale = torch.zeros_like(lens), torch.full((setup.n_seq,), LENGTH, dtype=torch.int32), 0.1

    def decode(rows: Tensor, held: Tensor) -> tuple[Tensor, Tensor]:
        out, lse, _ = ops.decode(
            q, new, new, pages, rows, held.clone(), torch.full_like(held, 2**31 - 1), recent, q_pos, KEEP_ALL,
            scale=scale,
        )  # fmt: skip
        return out, lse

    def two_phases(shared: int) -> Callable[[], object]:
        own, count = table[:, shared // setup.slots :].contiguous(), torch.full_like(lens[: setup.n_kv_heads], shared)

        def call() -> object:
            if not shared:
                return decode(table, lens)
            found = ops.attend(q, pages, table[: setup.n_kv_heads], count, scale=scale)
            return ops.lse_merge(*decode(own, lens - shared), *found)

        return call

    return {"each alone": lambda: decode(table, lens)} | {f"{n}": two_phases(n) for n in SHARED}


def shared_rows(rounds: int = 20) -> list[Row]:
    """Two phases at several lengths of the shared prefix, against every sequence reading a copy of its own."""
    rows = []
    for name, (n_kv_heads, group, dim) in HEADS.items():
        setup = DecodeSetup(
            torch.bfloat16, 32, n_seq=BATCH, n_kv_heads=n_kv_heads, group=group, dim=dim, lens=(LENGTH,) * BATCH
        )
        ms = time_in_turns(_calls(setup), rounds)
        alone = ms.pop("each alone")
        rows.append(Row(f"{BATCH} x {LENGTH}, {name}", alone, setup.n_bytes / alone / 1e6, 1.0, "each alone"))
        rows += [Row(f"  {int(n) * 100 // LENGTH}% shared", t, 0.0, alone / t, "each alone") for n, t in ms.items()]
    return rows
