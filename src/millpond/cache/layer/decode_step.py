"""One decoding step of a layer: room for the new entry, attention, eviction, and ratio budgets that grow."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from millpond.cache.attention.paged import PagedAttention
from millpond.cache.entries.compaction import SlotView, rows_at, slots_of
from millpond.cache.entries.due import demote_due, pages_due, quantize_due
from millpond.cache.pages.page_table import PageTable
from millpond.cache.pages.ref_counted_pool import Pool
from millpond.cache.planning.head_competition import HeadCompetition
from millpond.cache.planning.planner import Planner
from millpond.cache.state.positions import ForwardSpan, PositionTracker
from millpond.cache.state.sequence_state import SequenceState
from millpond.errors import NumericsError
from millpond.kernels import ops
from millpond.kernels.args import AttentionShape, DecodeRowsArgs, StepRegions
from millpond.kernels.decode_rules import KEEP_ALL, DecodeRule, Evict, Signal, choose_evicted
from millpond.kernels.eager.pages import scatter
from millpond.kernels.transfers import ReadBack, on_device
from millpond.policy.decode_rule import on_sliding_layer
from millpond.policy.policy import Policy


def evict_due(table: PageTable, rule: DecodeRule, q_pos: Tensor, active: np.ndarray, window: int) -> None:
    """Evict the entry that `rule` chooses from each head that a step has put over its budget.

    Args:
        table: Table of the layer.
        rule: Decode rule of the layer.
        q_pos: Positions (S,) int32 of the new tokens.
        active: Which sequences had a new token, (S,) bool.
        window: Window of the layer; 0 for none.
    """
    over = (table.entries() > table.budgets()) & active[:, None]
    sequences = np.flatnonzero(over.any(1))
    if not len(sequences):
        return
    heads = table.n_kv_heads
    slots = SlotView.of(table, (sequences[:, None] * heads + np.arange(heads)).ravel())
    device = slots.positions.device
    rows = on_device(slots.rows, device)
    query = q_pos[on_device(sequences, device)].repeat_interleave(heads)[:, None]
    victim = choose_evicted(rule, slots.scores, slots.positions, query, table.recent[rows], window, heads)
    leave = torch.zeros_like(slots.valid).scatter_(1, victim[:, None], True)
    leave &= on_device(over[sequences].ravel(), device)[:, None]
    table.shrink(sequences, slots.evict(leave).reshape(-1, heads))


def score_newest(table: PageTable, q_pos: Tensor, scores: Tensor, *, appended: bool) -> None:
    """Give the newest entry of each KV head its score; skip entries that were not stored.

    Args:
        table: Table of the layer.
        q_pos: Position (S,) int32 of each sequence's new token, -1 for none.
        scores: Scores (S, KV heads) float32.
        appended: Whether each new entry is in the last plain slot of its region; else it may be anywhere.
    """
    width = int(table.lengths().max(initial=0))
    if not width:
        return
    ids, used = _last_slots(table) if appended else slots_of(table, table.pages, table.lens, width)
    positions = rows_at(table.pool.arrays.positions, ids)
    newest = q_pos.repeat_interleave(table.n_kv_heads)[:, None]
    here = used & (positions == newest) & (newest >= 0)
    given = scores.reshape(-1, 1).expand_as(ids)
    scatter(table.pool.arrays.scores, ids[here], given[here])


def _last_slots(table: PageTable) -> tuple[Tensor, Tensor]:
    """Return the flat id (R, 1) of the last used slot of each region, and whether it exists."""
    used, slots = table.lens[:, None] > 0, table.pool.slots
    last = (table.lens.long()[:, None] - 1).clamp(min=0)
    ids = table.pages.gather(1, last // slots).long() * slots + last % slots
    return torch.where(used, ids, 0), used


def grow(table: PageTable, positions: np.ndarray, budget: Callable[[PageTable, int, int], int]) -> None:
    """Set the budgets of sequences to those of the tokens seen, before a step.

    Args:
        table: Table of the layer.
        positions: Positions (S,) of the new tokens, -1 for none.
        budget: Entries per KV head, `budget(table, sequence, seen)`.
    """
    before = table.budgets()
    capacities = before.copy()
    for sequence in np.flatnonzero(positions >= 0).tolist():
        capacities[sequence] = budget(table, sequence, int(positions[sequence]) + 1)
    if (capacities != before).any():
        table.set_budgets(capacities)


#: On a GPU, columns between two looks at whether attention became NaN.
NAN_CHECK_COLUMNS = 64


class NanCheck:
    """Check of one layer's attention for NaN since the last look."""

    def __init__(self, layer: int) -> None:
        self._layer = layer
        self._nan: Tensor | None = None
        self._look: ReadBack | None = None

    def check(self, lse: Tensor, columns: int) -> None:
        """Refuse NaN at once on the CPU; elsewhere at intervals, so that no step waits.

        Args:
            lse: Log-sum-exp of a step's attention.
            columns: Columns that the layer had seen before.

        Raises:
            NumericsError: attention is NaN.
        """
        if lse.device.type == "cpu":
            total = lse.sum().item()  # in fewer calls than isnan().any(); -inf of those who saw nothing stays -inf
            self._refuse(total != total)
            return
        self._note(lse.isnan().any()[None], columns)

    def check_layers(self, lse: Tensor, columns: int) -> None:
        """Check this layer and those after it, whose steps ran together: lse (layers, S, Hq).

        Raises:
            NumericsError: attention of one of them is NaN.
        """
        self._note(lse.isnan().flatten(1).any(1), columns)

    def _note(self, is_nan: Tensor, columns: int) -> None:
        """Collect which layers (n,) are NaN; refuse them once that has reached the host."""
        self._nan = is_nan if self._nan is None else self._nan | is_nan
        if not columns % NAN_CHECK_COLUMNS:
            self._read()
            self._look, self._nan = ReadBack([self._nan]), None
        if self._look is not None and self._look.is_ready():
            self._read()

    def _read(self) -> None:
        look, self._look = self._look, None
        nan = [] if look is None else look.wait()[0].tolist()
        if any(nan):
            self._refuse(True, nan.index(True))

    def _refuse(self, nan: bool, behind: int = 0) -> None:
        if nan:
            raise NumericsError(f"layer {self._layer + behind}: attention is NaN; check the model's weights and inputs")


#: Tokens of a sequence that a pass decodes together: more are read as a prompt is.
FEW_ROWS = 32


class PendingStep(NamedTuple):
    """A step that has room: further inputs of its attention, and those of its end."""

    table: PageTable
    rule: DecodeRule
    shape: AttentionShape
    positions: np.ndarray  #: (S,) of the tokens, -1 where a sequence has none
    q_pos: Tensor  #: the same where the entries lie
    rivals: HeadCompetition | None  #: who competes in this step

    def regions(self) -> StepRegions:
        """Regions that attention reads."""
        return self.table.step_regions(self.rule, self.shape, self.q_pos)


class DecodeStep:
    """The decoding steps of one layer.

    Args:
        index: Index of the layer.
        policy: Policy of the layer.
        tracker: Positions of the sequences.
        attention: Attention of the layer.
        planner: Planner of the layer.
        sequence_state: State of the sequences.
    """

    def __init__(
        self,
        index: int,
        policy: Policy,
        tracker: PositionTracker,
        attention: PagedAttention,
        planner: Planner,
        sequence_state: SequenceState,
    ) -> None:
        self._index, self._policy, self._tracker = index, policy, tracker
        self._attention, self._planner, self._sequence_state = attention, planner, sequence_state
        self._rule: DecodeRule = policy.decode_rule(index)
        self._demotes = KEEP_ALL  # the rule by which entries go to a lower tier
        self._evicts = KEEP_ALL  # the rule by which entries leave after a step, where the kernel does not see them all
        self._rivals = policy.decode_allocation
        self._finite = NanCheck(index)

    @property
    def appends(self) -> bool:
        """Whether a step only adds entries."""
        keeps = all(rule.evict is Evict.NEVER for rule in (self._rule, self._demotes, self._evicts))
        return keeps and self._sequence_state.head_rules is None and not self._policy.plans_each_step

    def open(self, window: int, tiered: bool, aged: bool = False) -> None:
        """Begin with an empty table.

        Args:
            window: Window of the layer; 0 for none.
            tiered: Whether evicted entries may go to a lower tier.
            aged: Whether entries are in tiers of which the kernel does not read all.
        """
        self._rule = self._policy.decode_rule(self._index)
        if window:
            own = self._policy.plans_each_step or self._sequence_state.head_rules is not None
            self._rule = self._rule if own else on_sliding_layer(self._rule)
            self._sequence_state.rolling = None  # the window hides the sinks, and no distance exceeds it
        if tiered:
            self._demotes = self._rule
        if aged:
            self._evicts = self._rule
        if tiered or aged:
            self._rule = replace(self._rule, evict=Evict.NEVER)

    def take_over(self, other: DecodeStep) -> None:
        """Continue with a table that `other`, of the same layer and policy, has opened."""
        self._rule, self._demotes, self._evicts = other._rule, other._demotes, other._evicts

    def reset(self) -> None:
        """Forget all checks and counts."""
        self._finite = NanCheck(self._index)

    def pages(self, table: PageTable) -> dict[Pool, int]:
        """Return the most pages that the next step may take of each pool."""
        always, whole = self._rule.evict is Evict.NEVER, self._rule.signal is not Signal.NONE
        grows = always or self._policy.grows or bool(self._rivals.every)
        whole = whole or not always or self._evicts.evict is not Evict.NEVER
        need: dict[Pool, int] = {table.pool: table.pages_for_step(grows, whole)}
        return need | pages_due(table, whole or table.aged is not None)

    def plain(self, table: PageTable, shape: AttentionShape) -> bool:
        """Whether there is only `ops.decode` between `begin` and `end`, in the basis of the table."""
        besides = (self._sequence_state.rolling, self._sequence_state.selective)
        if type(self._attention) is not PagedAttention or self._policy.plans_each_step:
            return False
        if table.aged is not None:
            return False
        return all(part is None for part in besides) and self._attention.runs(table, self._rule, shape) is None

    def step(
        self,
        table: PageTable,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        positions: np.ndarray,
        columns: int,
        q_pos: Tensor | None = None,
        scores: Tensor | None = None,
    ) -> Tensor:
        """Decode one token per sequence.

        Args:
            table: Table of the layer.
            q: Queries (S, Hq, D).
            k: Keys (S, Hkv, D).
            v: Values (S, Hkv, D).
            positions: Positions (S,) of the tokens, -1 for a sequence without one.
            columns: Columns that the layer has seen before.
            q_pos: Positions on the device, if known.
            scores: Scores (S, Hkv) float32 of the new entries; None for those of the kernel's rule.

        Returns:
            (S, Hq, value_dim).
        """
        newest, rolling = self.begin(table, positions, q.device, q_pos), self._sequence_state.rolling
        if rolling is not None:
            q, k = rolling.step(table, q, k, positions)
        out, lse = self._attention.step(table, newest.rule, q, k, v, newest.q_pos)
        self.end(newest, lse, columns)
        selective = self._sequence_state.selective
        if selective is not None and not self._attention.shape.window:
            for sequence in np.flatnonzero(positions >= 0).tolist():
                selective.move_out(table, sequence)
        if scores is not None:
            appended = newest.rule.evict is Evict.NEVER and table.quantized is None
            score_newest(table, newest.q_pos, scores, appended=appended)
        if self._policy.plans_each_step:
            self._planner.stepped(table, q, newest.q_pos, positions)
        return out

    def one(
        self, table: PageTable, q: Tensor, k: Tensor, v: Tensor, span: ForwardSpan, columns: int, scores: Tensor | None
    ) -> Tensor:
        """Return `step` of the only column of a pass, (S, Hq, 1, value_dim).

        The arguments are those of `step`, with that column.
        """
        newest = None if scores is None else scores[..., 0]
        out = self.step(table, q[:, :, 0], k[:, :, 0], v[:, :, 0], span.token(0), columns, span.q_pos, newest)
        return out[:, :, None]

    def takes_few(self, table: PageTable, n: int, dtype: torch.dtype) -> bool:
        """Whether `few` takes `n` tokens: all entries stay, in their `dtype`, in pages of a CPU."""
        arrays = table.pool.arrays
        keeps = self._policy.keeps_all and self._rule == KEEP_ALL and self._sequence_state.head_rules is None
        if not keeps or n > FEW_ROWS or arrays.device.type != "cpu" or arrays.dtype is not dtype:
            return False
        return table.quantized is None and self.plain(table, self._attention.shape)

    def few(self, table: PageTable, q: Tensor, k: Tensor, v: Tensor, span: ForwardSpan) -> Tensor:
        """Decode a few tokens per sequence, if `takes_few`, each with the bits of a `step`.

        q: (S, Hq, n, D), k, v: (S, Hkv, n, D) -> (S, Hq, n, value_dim).

        Raises:
            PoolFullError: the pool is full; nothing was changed.
        """
        table.copy_on_write(whole=False)
        table.make_room(True, span.length)
        args = DecodeRowsArgs(q, k, v, table.regions, span.grid(), self._attention.shape)
        out, _ = ops.decode_rows(args)
        table.stepped(True, span.after > span.before, span.length)
        return out

    def begin(
        self, table: PageTable, positions: np.ndarray, device: torch.device, q_pos: Tensor | None = None
    ) -> PendingStep:
        """Make room; arguments as for `step`.

        Raises:
            PoolFullError: the pool is full; nothing was changed.
        """
        rule, always = self._rule, self._rule.evict is Evict.NEVER
        if q_pos is None:
            q_pos = on_device(positions.astype(np.int32), device)
        table.kept = self._tracker.marks.kept.tensor(device)
        table.least = self._planner.budgets.least(table, positions, device)
        quantize_due(table, positions >= 0)
        moves = not always or self._evicts.evict is not Evict.NEVER
        table.copy_on_write(whole=moves or rule.signal is not Signal.NONE)  # a signal goes into every slot
        if self._policy.grows:
            grow(table, positions, self._planner.budgets.of)
        rivals = HeadCompetition.of(table, self._rivals, positions)
        (rivals or table).make_room(always)
        return PendingStep(table, rule, self._attention.shape, positions, q_pos, rivals)

    def check_layers(self, lse: Tensor, columns: int) -> None:
        """Refuse NaN in this layer and those after it: see `NanCheck.check_layers`."""
        self._finite.check_layers(lse, columns)

    def end(self, step: PendingStep, lse: Tensor | None, columns: int) -> None:
        """Update counts, scores and positions after attention.

        Args:
            step: Step that `begin` returned.
            lse: Log-sum-exp (S, Hq); None if NaN was looked for elsewhere.
            columns: Columns that the layer has seen before.

        Raises:
            NumericsError: attention is NaN.
        """
        table, rule, shape, positions, q_pos, rivals = step
        always, head_rules = rule.evict is Evict.NEVER, self._sequence_state.head_rules
        table.stepped(always, positions >= 0)
        leaves = self._evicts.evict is not Evict.NEVER
        if lse is not None and (not always or leaves or head_rules is not None or self._policy.plans_each_step):
            self._finite.check(lse, columns)
        if head_rules is not None:
            assert self._tracker.tokens is not None, "token ids are kept for a policy that looks at them"
            head_rules.apply(table, self._tracker.tokens, positions, shape.window, self._tracker.marks.kept)
        if rivals is not None:
            rivals.compete(self._evicts if leaves else rule, q_pos, shape.window, self._tracker.marks.kept)
        if leaves:
            evict_due(table, self._evicts, q_pos, positions >= 0, shape.window)
        if self._policy.bounded and table.quantized is not None and table.quantized.codec.tiered:
            self._planner.budgets.shrink_upper_tier(table, positions)
        if self._demotes.evict is not Evict.NEVER:
            demote_due(table, self._demotes, positions, self._tracker.marks.kept)
