"""Random pools, regions and queries for the kernel tests."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from millpond.kernels import reference
from millpond.kernels.args import AttentionShape, DecodeArgs, DecodeOutput, PageRegions, StepRegions
from millpond.kernels.decode_rules import KEEP_ALL, UNBOUNDED, DecodeRule
from millpond.kernels.packed.regions import PackedRegions
from millpond.kernels.pages import PageArrays
from tests.helpers.kernels.args import write_args


@dataclass
class Case:
    """The arguments of one decode call. `lens` is per region; 0 is allowed."""

    lens: list[int]
    n_seq: int = 1
    n_kv_heads: int = 1
    group: int = 1
    key_dim: int = 16
    value_dim: int = 16
    slots: int = 8
    dtype: torch.dtype = torch.float32
    pages_per_arena: int = 4
    caps: list[int] | None = None
    recent: list[int] | None = None
    inactive: set[int] = field(default_factory=set)
    rule: DecodeRule = KEEP_ALL
    softcap: float = 0.0
    window: int = 0
    sinks: bool = False
    same_slots: bool = False  # all KV heads of a sequence hold the same positions in the same slots
    room: int = 1  # slots that a region can grow by
    masses: bool = False  # entries stand for 1 to 20 others
    seed: int = 0

    def build(self) -> Call:
        return Call(self)


def unwritten(pages: PageArrays) -> PageArrays:
    """Full of NaN: what a kernel must never read."""
    for arena in (*pages.keys, *pages.values, *pages.scores, *pages.log_masses):
        arena.fill_(float("nan"))
    for positions in pages.positions:
        positions.fill_(-7)
    return pages


def empty_pool(case: Case, n_pages: int) -> PageArrays:
    cpu = torch.device("cpu")
    shape = (case.pages_per_arena, case.slots, case.key_dim, case.value_dim)
    pages = PageArrays(*shape, case.dtype, cpu, masses=case.masses)
    while pages.n_arenas * case.pages_per_arena < n_pages:
        pages.add_arena()
    return unwritten(pages)


class Call:
    """A pool filled with random entries and the arguments of one decode call over it."""

    def __init__(self, case: Case) -> None:
        self.case = case
        gen = torch.Generator().manual_seed(case.seed)
        n_regions = case.n_seq * case.n_kv_heads
        width = max(case.lens, default=0)
        n_table = -(-(width + case.room) // case.slots)
        self.pages = empty_pool(case, n_regions * n_table)
        order = torch.randperm(n_regions * n_table, generator=gen)
        self.table = order.view(n_regions, n_table).int()
        self.lens = torch.tensor(case.lens, dtype=torch.int32)
        self.kept: Tensor | None = None  # spans that never leave
        self.least: Tensor | None = None  # spans of which some entries stay
        self.caps = torch.tensor(case.caps or [UNBOUNDED] * n_regions, dtype=torch.int32)
        self.recent = torch.tensor(case.recent or [0] * n_regions, dtype=torch.int32)
        heads = case.n_kv_heads * case.group
        self.q = torch.randn(case.n_seq, heads, case.key_dim, generator=gen).to(case.dtype)
        self.k_new = torch.randn(case.n_seq, case.n_kv_heads, case.key_dim, generator=gen).to(case.dtype)
        self.v_new = torch.randn(case.n_seq, case.n_kv_heads, case.value_dim, generator=gen).to(case.dtype)
        self.sink_logits = torch.randn(heads, generator=gen) if case.sinks else None
        span = [max(case.lens[s * case.n_kv_heads : (s + 1) * case.n_kv_heads], default=0) for s in range(case.n_seq)]
        self.q_pos = torch.tensor([-1 if s in case.inactive else 2 * n + 3 for s, n in enumerate(span)]).int()
        positions = torch.zeros(n_regions, max(width, 1), dtype=torch.int32)
        for r in range(n_regions):
            if r % case.n_kv_heads and case.same_slots:
                positions[r] = positions[r - 1]
                continue
            seq = r // case.n_kv_heads
            drawn = torch.randperm(2 * span[seq] + 3, generator=gen)[: max(width, 1)]
            positions[r, : len(drawn)] = drawn.int()
        self.keys = torch.randn(n_regions, max(width, 1), case.key_dim, generator=gen).to(case.dtype)
        self.values = torch.randn(n_regions, max(width, 1), case.value_dim, generator=gen).to(case.dtype)
        self.scores = torch.rand(n_regions, max(width, 1), generator=gen)
        self.positions = positions
        self.log_masses = torch.rand(self.scores.shape, generator=gen) * 3 if case.masses else None
        self._fill(reference)

    def _fill(self, impl: ModuleType) -> None:
        index = torch.arange(self.keys.shape[1], dtype=torch.int32).expand(len(self.lens), -1)
        start = torch.zeros_like(self.lens)
        rows = (self.keys, self.values, self.positions, self.scores, self.log_masses)
        impl.write(*write_args(self.pages, self.table, start, self.lens, index, *rows))

    def clone(self) -> Call:
        other = copy.copy(self)
        other.pages = clone_pages(self.pages)
        other.lens = self.lens.clone()
        return other

    def args(self, packed: PackedRegions | None = None, **changes: Any) -> DecodeArgs:
        """Of one decode call. `changes`: of the rule, or of the shape of the attention."""
        case = self.case
        settings = {"scale": case.key_dim**-0.5, "softcap": case.softcap, "window": case.window}
        settings |= {"sink_logits": self.sink_logits, **changes}
        rule = settings.pop("rule", case.rule)
        shape = AttentionShape(**settings)
        spans = (self.kept, self.least)
        regions = StepRegions(self.regions, self.caps, self.recent, self.q_pos, rule, shape, packed, *spans)
        return DecodeArgs(self.q, self.k_new, self.v_new, regions)

    @property
    def regions(self) -> PageRegions:
        return PageRegions(self.pages, self.table, self.lens)

    def run(self, impl: ModuleType, **changes: Any) -> DecodeOutput:
        result: DecodeOutput = impl.decode(self.args(**changes))
        return result

    def contents(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return reference.read(self.regions, int(self.lens.max()))[:4]

    def masses(self) -> Tensor | None:
        """The log masses of what the regions hold."""
        return reference.read(self.regions, int(self.lens.max())).log_masses


def clone_pages(pages: PageArrays) -> PageArrays:
    other = replace(pages)
    for name in ("keys", "values", "positions", "scores", "log_masses"):
        setattr(other, name, [t.clone() for t in getattr(pages, name)])
    other.refresh()
    return other
