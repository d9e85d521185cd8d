"""Random packed regions beside plain ones, for the kernel tests."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from types import ModuleType

import torch
from torch import Tensor

from millpond.kernels import reference
from millpond.kernels.args import DecodeOutput, EntryRows
from millpond.kernels.packed.layout import Format, PackedArrays, PackedLayout, Side
from millpond.kernels.packed.regions import PackedRegions, Rope
from tests.helpers.kernels.make import Call, Case


def table_for(format: Format) -> tuple[float, ...]:
    """An uneven table of numbers that bfloat16 holds exactly; empty for formats without one."""
    if not format.uses_table:
        return ()
    even = torch.linspace(-1, 1, 1 << format.bits)
    return tuple((even.sign() * even.abs() ** 1.5).bfloat16().float().tolist())


def side(format: Format, by_channel: bool = False, group: int = 0, symmetric: bool = False, **more: object) -> Side:
    if not format.grouped:
        return Side(format)
    symmetric = symmetric and not format.uses_table
    return replace(Side(format, by_channel, group, symmetric, table=table_for(format)), **more)  # type: ignore[arg-type]


def rope_for(dim: int, positions: int, rotated: int, *, interleaved: bool = False, scale: float = 1.0) -> Rope:
    """The tables of a rotation of the first `rotated` channels, in halves or as neighbours."""

    def turn(x: Tensor, at: Tensor) -> Tensor:
        angles = at[0, :, None] * 100.0 ** (-torch.arange(rotated // 2) / rotated)
        cos, sin = scale * angles.cos(), scale * angles.sin()
        out = x.clone()
        first = slice(0, rotated, 2) if interleaved else slice(0, rotated // 2)
        second = slice(1, rotated, 2) if interleaved else slice(rotated // 2, rotated)
        a, b = x[..., first], x[..., second]
        out[..., first], out[..., second] = a * cos - b * sin, b * cos + a * sin
        return out

    return Rope.of(turn, dim, positions)


@dataclass
class PackedCase:
    """`plain` says what lies in plain pages and everything about the call; `lens`: packed slots per region.

    rope: of keys that are stored before it. shift: added to a few channels of every key.
    in_order: packed positions ascend, page after page.
    """

    plain: Case
    lens: list[int]
    key: Side
    value: Side
    slots: int = 64
    dead: int = 0  # tombstones per region, where it has that many slots
    keep: int = 0  # stored key channels, 0: all
    balanced: bool = False
    rope: Rope | None = None
    shift: float = 0.0
    in_order: bool = False

    def build(self) -> PackedCall:
        return PackedCall(self)


class PackedCall:
    """Both parts, filled, and the arguments of one decode call."""

    def __init__(self, case: PackedCase) -> None:
        self.case, plain = case, case.plain
        self.plain: Call = plain.build()
        gen = torch.Generator().manual_seed(plain.seed + 1)
        n_regions, width = len(case.lens), max([1, *case.lens])
        dim = case.keep or plain.key_dim
        self.layout = PackedLayout(case.slots, dim, plain.value_dim, case.key, case.value)
        n_table = -(-width // case.slots)
        pages = PackedArrays(4, self.layout, torch.device("cpu"), plain.masses)
        while pages.n_arenas * 4 < n_regions * n_table:
            pages.add_arena()
        for arena in pages.codes:
            arena.random_(0, 256, generator=gen)  # what was never written may hold anything
        for arena in (*pages.positions, *pages.scores, *pages.log_masses):
            arena.zero_()
        table = torch.randperm(n_regions * n_table, generator=gen).view(n_regions, n_table).int()
        fixed = case.key.fixed
        step, lowest = (2.0, 0.1) if case.key.format.uses_table else (0.3, -3.0)  # about what N(0, 1) needs
        heads = plain.n_kv_heads
        channels = [torch.randperm(plain.key_dim, generator=gen)[:dim].sort().values for _ in range(n_regions)]
        self.packed = PackedRegions(
            pages,
            table,
            torch.tensor(case.lens, dtype=torch.int32),
            torch.zeros(n_regions, dtype=torch.int32),
            torch.stack(channels).int() if case.keep else None,
            torch.rand(n_regions, dim, generator=gen) + 0.5 if case.balanced else None,
            step * (torch.rand(heads, dim, generator=gen) + 1) if fixed else None,
            torch.full((heads, dim), lowest) if fixed else None,
            case.rope,
        )
        shift = case.shift * (torch.arange(plain.key_dim) % 8 == 3)  # few channels are far from 0
        self.keys = (torch.randn(n_regions, width, plain.key_dim, generator=gen) + shift).to(plain.dtype)
        self.values = torch.randn(n_regions, width, plain.value_dim, generator=gen).to(plain.dtype)
        # positions of their own: below the plain ones, which are moved up
        self.positions = torch.stack([torch.randperm(width, generator=gen) for _ in range(n_regions)]).int()
        self.positions = self.positions.sort(1).values if case.in_order else self.positions
        for arena in self.plain.pages.positions:
            arena += width
        self.plain.q_pos = torch.where(self.plain.q_pos >= 0, self.plain.q_pos + width, -1).int()
        self.scores = torch.rand(n_regions, width, generator=gen)
        self.log_masses = torch.rand(n_regions, width, generator=gen) if plain.masses else None
        index = torch.arange(width, dtype=torch.int32).expand(n_regions, width)
        start, rows = torch.zeros_like(self.packed.lens), (self.keys, self.values, self.positions, self.scores)
        given = EntryRows(start, self.packed.lens, index, *rows, self.log_masses)
        reference.write_packed(self.packed, given)
        for r, n in enumerate(case.lens):
            for slot in torch.randperm(n, generator=gen)[: case.dead].tolist():
                arena, at = divmod(int(table[r, slot // case.slots]), 4)
                pages.positions[arena][at, slot % case.slots] = -1
                self.packed.dead[r] += 1

    def clone(self) -> PackedCall:
        other = copy.copy(self)
        other.plain = self.plain.clone()
        pages = replace(self.packed.pages)
        for name in ("codes", "positions", "scores", "log_masses"):
            setattr(pages, name, [t.clone() for t in getattr(pages, name)])
        pages.refresh()
        other.packed = replace(self.packed, pages=pages, dead=self.packed.dead.clone())
        return other

    def run(self, impl: ModuleType) -> DecodeOutput:
        result: DecodeOutput = impl.decode(self.plain.args(self.packed))
        return result

    def contents(self) -> tuple[Tensor, ...]:
        """Keys, values, positions and scores of the packed part, and what the plain part holds."""
        head_dim = self.case.plain.key_dim
        packed = reference.read_packed(self.packed, max([1, *self.case.lens]), head_dim)[:4]
        plain = reference.read(self.plain.regions, max(1, int(self.plain.lens.max())))[:4]
        return (*packed, *plain)
