"""Any order of growing, evicting, sharing, forking and freeing: no leak, no double free, no write to a shared page."""

import hypothesis.strategies as st
import numpy as np
import torch
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from millpond.cache.pages.page_table import PageTable
from millpond.cache.pages.pool import PagePool
from millpond.errors import PoolFullError
from millpond.kernels import ops
from millpond.kernels.args import EntryRows
from millpond.kernels.decode_rules import DecodeRule, Evict, Signal
from tests.helpers.examples import examples
from tests.helpers.kernels.args import decode_args

H = 2  # KV heads


class Tables(RuleBasedStateMachine):
    """Tables over one small pool, each with a model of what it must hold: (position, key) per region."""

    def __init__(self) -> None:
        super().__init__()
        page = PagePool(4, 4, torch.float32, slots=4).page_bytes
        self.pool = PagePool(4, 4, torch.float32, slots=4, limit_bytes=40 * page)
        self.tables: list[PageTable] = []
        self.models: list[list[dict[int, float]]] = []  # table -> region -> position -> key value
        self.clock: list[list[int]] = []  # table -> sequence -> next position
        self.counter = 0.0

    def fresh(self) -> float:
        self.counter += 1.0
        return self.counter

    @precondition(lambda self: len(self.tables) < 4)
    @rule(n_seq=st.integers(1, 2))
    def open(self, n_seq: int) -> None:
        self.tables.append(PageTable(self.pool, n_seq, H))
        self.models.append([{} for _ in range(n_seq * H)])
        self.clock.append([0] * n_seq)

    @precondition(lambda self: self.tables)
    @rule(pick=st.integers(0, 99), cap=st.integers(2, 12), evicts=st.booleans())
    def step(self, pick: int, cap: int, evicts: bool) -> None:
        i = pick % len(self.tables)
        table, model, clock = self.tables[i], self.models[i], self.clock[i]
        capacities = np.maximum(table.lengths().max(1), cap)
        for s in range(table.n_seq):
            table.set_budget(s, np.full(H, capacities[s], dtype=np.int32), 1)
        rule_ = DecodeRule(signal=Signal.SUM, evict=Evict.OLDEST) if evicts else DecodeRule()
        try:
            table.copy_on_write(whole=evicts)
            table.make_room(not evicts)
        except PoolFullError:
            return
        n = table.n_seq
        value = torch.tensor([self.fresh() for _ in range(n * H)]).view(n, H, 1).expand(n, H, 4)
        q_pos = torch.tensor(clock, dtype=torch.int32)
        _, _, gone = ops.decode(
            decode_args(
                torch.zeros(n, H, 4),
                value,
                value,
                self.pool.arrays,
                table.pages,
                table.lens,
                table.capacities,
                table.recent,
                q_pos,
                rule_,
                scale=1.0,
            )
        )
        table.stepped(not evicts, np.ones(n, dtype=bool))
        for r in range(n * H):
            if gone[r] >= 0:
                del model[r][int(gone[r])]
            model[r][clock[r // H]] = float(value[r // H, r % H, 0])
            assert not evicts or len(model[r]) <= capacities[r // H]
        for s in range(n):
            clock[s] += 1

    @precondition(lambda self: self.tables)
    @rule(pick=st.integers(0, 99), keep=st.integers(0, 6))
    def shrink(self, pick: int, keep: int) -> None:
        """Keep the newest entries, as a plan would: rewrite into fresh pages."""
        i = pick % len(self.tables)
        table, model = self.tables[i], self.models[i]
        for s in range(table.n_seq):
            rows = table.rows(s)
            width = int(table.lengths()[s].max())
            dense = ops.read(table.regions_of(rows), width)
            order = torch.argsort(dense.positions, dim=1, descending=True)[:, :keep]
            lens = np.minimum(table.lengths()[s], keep).astype(np.int32)
            table.renew(s, lens)
            start, index = torch.zeros(H, dtype=torch.int32), order.int().contiguous()
            ops.write(table.regions_of(rows), EntryRows(start, torch.from_numpy(lens), index, *dense))
            table.set_lengths(s, lens)
            for r in range(rows.start, rows.stop):
                model[r] = {p: model[r][p] for p in sorted(model[r])[len(model[r]) - int(lens[r - rows.start]) :]}

    @precondition(lambda self: 0 < len(self.tables) < 4)
    @rule(pick=st.integers(0, 99))
    def fork(self, pick: int) -> None:
        i = pick % len(self.tables)
        self.tables.append(self.tables[i].fork())
        self.models.append([dict(m) for m in self.models[i]])
        self.clock.append(list(self.clock[i]))

    @precondition(lambda self: self.tables)
    @rule(pick=st.integers(0, 99), order=st.lists(st.integers(0, 9), min_size=1, max_size=3))
    def select(self, pick: int, order: list[int]) -> None:
        i = pick % len(self.tables)
        table = self.tables[i]
        chosen = [o % table.n_seq for o in order]
        table.select(chosen)
        self.models[i] = [dict(self.models[i][s * H + h]) for s in chosen for h in range(H)]
        self.clock[i] = [self.clock[i][s] for s in chosen]

    @precondition(lambda self: self.tables)
    @rule(pick=st.integers(0, 99))
    def close(self, pick: int) -> None:
        i = pick % len(self.tables)
        self.tables.pop(i).clear()
        self.models.pop(i)
        self.clock.pop(i)
        self.pool.trim()

    @invariant()
    def pool_is_sound(self) -> None:
        self.pool.check_integrity([t.held() for t in self.tables])
        assert self.pool.n_live <= 40

    @invariant()
    def content_is_what_was_written(self) -> None:
        for table, model in zip(self.tables, self.models, strict=True):
            dense = ops.read(table.regions, int(table.lengths().max(initial=0)))
            for r, expected in enumerate(model):
                n = int(table.lens[r])
                found = {int(p): float(k) for p, k in zip(dense.positions[r, :n], dense.keys[r, :n, 0], strict=True)}
                assert found == expected

    def teardown(self) -> None:
        for table in self.tables:
            table.clear()
        assert self.pool.n_live == 0


TestTables = Tables.TestCase
TestTables.settings = settings(max_examples=examples(60), stateful_step_count=25)
