"""LayerCache.attend: the one place where write, attend, score, plan and apply happen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from millpond.cache.focus import focus_of
from millpond.cache.growth import grow
from millpond.cache.headwise import Headwise
from millpond.cache.parts import AttentionShape, Candidates, LayerState, by_position
from millpond.cache.peek import Peek
from millpond.cache.pool import PagePool
from millpond.cache.queries import QueryMemory
from millpond.cache.rivals import Rivals
from millpond.cache.rolling import Rolling, Rotation
from millpond.cache.table import RegionTable
from millpond.cache.timeline import Span, Timeline
from millpond.errors import CacheMismatchError, NumericsError, OptionError
from millpond.kernels import ops
from millpond.kernels.observe import window_signal
from millpond.kernels.rules import UNBOUNDED, DecodeRule, Evict, Reduce, Signal
from millpond.policy.merge import Merged
from millpond.policy.moments import QueryMoments, QueryView
from millpond.policy.nested import NestedPlan, NestedPolicy
from millpond.policy.policy import REDUCE, Policy, on_sliding_layer
from millpond.policy.view import View

#: On a GPU, decoding steps between two looks at whether attention became NaN.
NAN_CHECK_STEPS = 64


class LayerCache:
    """The cache of one attention layer for a batch of sequences.

    Args:
        index: of the layer.
        policy: what is kept.
        entries: `entries(table, sequence, seen)` -> budget in entries per KV head for a sequence of `seen` tokens.
        pool: `pool(key_dim, value_dim, dtype, device)` -> the pool that holds pages of this shape.
        timeline: shared by all layers.
        between_chunks: plan at the end of every multi-token pass; else once, before the next single-token pass.
        rotation: how keys are rotated by position, for policies with cache-relative positions.
    """

    def __init__(
        self,
        index: int,
        policy: Policy,
        entries: Callable[[RegionTable, int, int], int],
        pool: Callable[[int, int, torch.dtype, torch.device], PagePool],
        timeline: Timeline,
        *,
        between_chunks: bool = True,
        rotation: Rotation | None = None,
    ) -> None:
        self.index = index
        self.policy = policy
        self.timeline = timeline
        self.columns = 0  # columns (pads included) that this layer has seen
        self.outputs: Callable[[], Tensor] | None = None  # see `View.outputs`; set by whoever knows the model
        self.peek: Peek | None = None  # while set, passes of many tokens are looked at and not taken in
        self.rope: Rotation | None = None  # how the layer rotates queries, for scores that undo it; None: not at all
        self._entries = entries
        self._pool = pool
        self._between_chunks = between_chunks
        self._table: RegionTable | None = None
        self._rule: DecodeRule = policy.decode_rule(index)
        self._rivals = policy.rivals
        self._shape = AttentionShape(1.0)
        self._queries = QueryMemory(policy)
        self._memories: dict[int, Tensor] = {}  # by sequence: what its last merge left for the next
        self._pending: frozenset[int] = frozenset()  # sequences with entries that no plan has seen
        self._nan: Tensor | None = None  # whether attention was NaN since the last check
        self._rolling = Rolling(rotation, policy.protect.sinks) if rotation is not None else None
        self._headwise = Headwise(policy) if isinstance(policy, NestedPolicy) else None
        self._focus = focus_of(policy, index)

    # ------------------------------------------------------------------ what others may ask

    @property
    def table(self) -> RegionTable | None:
        """Pages and lengths; None before the first token."""
        return self._table

    @property
    def stored(self) -> np.ndarray:
        """(n_seq, n_kv_heads) entries held."""
        return self._table.lengths() if self._table is not None else np.zeros((0, 0), dtype=np.int32)

    def read(self, sequence: int) -> ops.Dense:
        """The entries of one sequence, one row per KV head, in the order of their positions, padded at the end."""
        table = self._require_table()
        dense = self._dense(table, sequence)
        order = by_position(dense.positions)
        return ops.Dense(
            dense.keys.gather(1, order[..., None].expand_as(dense.keys)),
            dense.values.gather(1, order[..., None].expand_as(dense.values)),
            dense.positions.gather(1, order),
            dense.scores.gather(1, order),
            None if dense.log_masses is None else dense.log_masses.gather(1, order),
        )

    def measure(self, sequence: int, of: Callable[[View], float]) -> float:
        """A number `of` one sequence as a plan would see it now."""
        found = Candidates(*self._dense(self._require_table(), sequence))
        found = found._replace(scores=self._signal(sequence, found))
        order = by_position(found.positions)
        return of(self._view(sequence, found, found.positions, order, int(found.positions.max()) + 1))

    # ------------------------------------------------------------------ the step

    def offer(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """What a model goes on computing with, given the new entries that it hands in: here just these."""
        return k, v

    def accept(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """The new entries for `attend`, given the keys and values that came of `offer`: here the same."""
        return k, v

    def forget(self) -> None:
        """Drop what was kept of the last pass only so that its tokens could be taken back: here nothing."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, shape: AttentionShape) -> Tensor:
        """Take in new tokens and return their attention over what is kept and themselves.

        Args:
            q: (B, Hq, Q, key_dim). k: (B, Hkv, Q, key_dim). v: (B, Hkv, Q, value_dim), keys after RoPE.
            mask: (B, >= Q) bool, newest columns last, False for pads; None: no pads. Pads are never stored.

        Returns:
            (B, Hq, Q, value_dim); zero at pads.

        Raises:
            PoolFullError, CacheMismatchError, BudgetError, NumericsError: see `millpond.errors`.
        """
        span = self.timeline.span(self.columns, q.shape[2], q.shape[0], mask, q.device)
        table = self._table or self._open(q, k, v, shape)
        self._shape = shape
        if span.length == 1 and (span.before > 0).all() and self.peek is None:
            self._settle(table)
            out = self._step(table, q[:, :, 0], k[:, :, 0], v[:, :, 0], span.token(0), span.q_pos)[:, :, None]
        elif self.policy.prefill == "greedy":
            out = self._token_by_token(table, q, k, v, span)
        else:
            out = self._prefill(table, q, k, v, span)
        self.columns += span.length
        return out

    def _open(self, q: Tensor, k: Tensor, v: Tensor, shape: AttentionShape) -> RegionTable:
        pool = self._pool(k.shape[-1], v.shape[-1], k.dtype, k.device)
        assert pool.arrays.masses or not self.policy.mass_bias, "entries that merge with mass_bias have masses"
        self._table = RegionTable(pool, k.shape[0], k.shape[1])
        if shape.window:
            own = self.policy.replans or self._headwise is not None
            self._rule = self._rule if own else on_sliding_layer(self._rule)
            self._rolling = None  # the window hides the sinks, and no distance exceeds it
        return self._table

    def _require_table(self) -> RegionTable:
        if self._table is None:
            raise CacheMismatchError(f"layer {self.index} holds nothing yet: run the model first")
        return self._table

    # ------------------------------------------------------------------ decoding

    def _step(
        self, table: RegionTable, q: Tensor, k: Tensor, v: Tensor, positions: np.ndarray, q_pos: Tensor | None = None
    ) -> Tensor:
        """One token per sequence. q: (S, Hq, D), k, v: (S, Hkv, D) -> (S, Hq, value_dim).

        `positions` (S,): of the tokens, -1 where a sequence has none; `q_pos`: the same on the device, if known.
        """
        if q_pos is None:
            q_pos = torch.from_numpy(positions.astype(np.int32)).to(q.device)
        rule = self._rule
        always = rule.evict is Evict.NEVER
        table.privatise(whole=not always or rule.signal is not Signal.NONE)  # a signal goes into every slot
        if self.policy.grows:
            grow(table, positions, self._budget)
        rivals = Rivals.of(table, self._rivals, positions)
        if rivals is None:
            table.make_room(always)
        else:
            rivals.make_room(always)
        if self._rolling is not None:
            q, k = self._rolling.step(table, q, k, v, positions)
        out, lse = self._decode(table, q, k, v, q_pos)
        table.stepped(always, positions >= 0)
        if not always or self._headwise is not None:
            self._check_finite(lse)
        if self._headwise is not None:
            assert self.timeline.tokens is not None, "token ids are kept for a policy that looks at them"
            self._headwise.admit(table, self.timeline.tokens, positions, self._shape.window)
        if rivals is not None:
            rivals.compete(rule, q_pos, self._shape.window)
        if self.policy.replans:
            asks = self.policy.window > 0 or self.policy.sums_queries
            for sequence in np.flatnonzero((positions >= 0) & asks).tolist():
                self._queries.remember(sequence, q[sequence, :, None], q_pos[sequence : sequence + 1], self.rope)
            self._replan(table, positions)
        return out

    def _replan(self, table: RegionTable, positions: np.ndarray) -> None:
        """After a step, evict or merge what no kernel rule could: sequences go back to the budget of their last plan.

        Policies that merge let `merge_every` entries gather beyond it first.
        """
        caps = table.budgets().astype(np.int64)
        due = (positions >= 0) & (table.lengths() - caps >= self.policy.merge_every).any(1)
        for sequence in np.flatnonzero(due).tolist():
            found, budget = Candidates(*self._dense(table, sequence)), int(caps[sequence].sum()) // table.n_kv_heads
            self._plan(table, sequence, found, int(positions[sequence]) + 1, budget)

    def _check_finite(self, lse: Tensor) -> None:
        """Refuse NaN at once on the CPU; elsewhere once in a while, so that no step waits for the device."""
        self._nan = lse.isnan().any() if self._nan is None else self._nan | lse.isnan().any()
        if lse.device.type != "cpu" and self.columns % NAN_CHECK_STEPS:
            return
        nan, self._nan = bool(self._nan), None
        if nan:
            raise NumericsError(f"layer {self.index}: attention is NaN; check the model's weights and inputs")

    def _decode(self, table: RegionTable, q: Tensor, k: Tensor, v: Tensor, q_pos: Tensor) -> tuple[Tensor, Tensor]:
        """Attend, score, evict, store: `ops.decode`. Returns (S, Hq, value_dim) and the log-sum-exp (S, Hq)."""
        if self._focus is not None and not self._shape.window:
            found = self._focus.decode(table, q, k, v, q_pos, self._shape, self.rope)
            if found is not None:
                return found
        out, lse, _ = ops.decode(
            q, k, v, table.pool.arrays, table.pages, table.lens, table.caps, table.recent, q_pos, self._rule,
            **self._shape.kwargs,
        )  # fmt: skip
        return out, lse

    def _token_by_token(self, table: RegionTable, q: Tensor, k: Tensor, v: Tensor, span: Span) -> Tensor:
        """A multi-token pass as if it had been decoded."""
        for sequence in np.flatnonzero(~span.decoding & (span.after > span.before)).tolist():
            self._set_budget(table, sequence, self._budget(table, sequence, int(span.after[sequence])), None)
        steps = [
            self._step(table, q[:, :, column], k[:, :, column], v[:, :, column], span.token(column))
            for column in range(span.length)
        ]
        return torch.stack(steps, 2)

    # ------------------------------------------------------------------ prefill

    def _prefill(self, table: RegionTable, q: Tensor, k: Tensor, v: Tensor, span: Span) -> Tensor:
        out = q.new_zeros(*q.shape[:3], self._value_dim(v))
        # what has a single new token decodes, as it would outside this batch; in a prompt in chunks nothing tells
        decoding = span.decoding if self._between_chunks else np.zeros(table.n_seq, dtype=bool)
        if decoding.any():
            self._decode_some(table, q, k, v, span, decoding, out)
        for sequence in np.flatnonzero(~decoding).tolist():
            columns = span.columns(sequence)
            positions = span.positions(sequence)
            if len(positions):
                q_own, k_own, v_own = (t[sequence, :, columns] for t in (q, k, v))
                out[sequence, :, columns] = self._prefill_one(table, sequence, q_own, k_own, v_own, positions)
        return out

    def _decode_some(
        self, table: RegionTable, q: Tensor, k: Tensor, v: Tensor, span: Span, decoding: np.ndarray, out: Tensor
    ) -> None:
        """One decoding step of the sequences in `decoding` (S,) bool, whose only token may lie in any column."""
        rows = torch.arange(table.n_seq, device=q.device)
        columns = torch.from_numpy(span.first_columns()).to(q.device)
        q_own, k_own, v_own = (t[rows, :, columns] for t in (q, k, v))
        step = self._step(table, q_own, k_own, v_own, np.where(decoding, span.before, -1))
        chosen = torch.from_numpy(decoding).to(q.device)
        out[rows[chosen], :, columns[chosen]] = step[chosen]

    def _value_dim(self, v: Tensor) -> int:
        """Numbers per output head."""
        return v.shape[-1]

    def _prefill_one(self, table: RegionTable, sequence: int, q: Tensor, k: Tensor, v: Tensor, q_pos: Tensor) -> Tensor:
        """Many tokens of one sequence. q: (Hq, Q, D), k, v: (Hkv, Q, D) -> (Hq, Q, value_dim)."""
        if self._rolling is not None:
            q, k = self._rolling.prefill(table, sequence, q, k, v, q_pos)
        past = self._dense(table, sequence)
        has_past = past.positions.shape[1] > 0
        keys = torch.cat([past.keys.to(k.dtype), k], 1) if has_past else k
        values = torch.cat([past.values.to(v.dtype), v], 1) if has_past else v
        reduce = REDUCE[self.policy.reduce] if self.policy.observes_all else None
        past_pos = past.positions if has_past else None
        past_masses = past.log_masses if has_past else None
        masses = None if past_masses is None else torch.nn.functional.pad(past_masses, (0, k.shape[1]))
        out, lse, colsum = self._attend_many(sequence, q, keys, values, q_pos, past_pos, reduce, past_masses)
        if self.peek is not None:
            positions = torch.cat([past.positions, q_pos.expand(len(k), -1)], 1)
            met = self._keys_of(sequence, Candidates(keys, values, positions, past.scores))
            self.peek.look(sequence, q, lse, q_pos, met, positions.expand(len(met), -1), self._shape, masses)
            return out
        if self.policy.keeps_all and not self._shape.window:
            self._append(table, sequence, k, v, q_pos)
            return out
        self._queries.remember(sequence, q, q_pos, self.rope)
        if self._headwise is not None:
            self._headwise.remember(sequence, q, lse, q_pos)
        new_pos = q_pos.expand(k.shape[0], -1)
        positions = torch.cat([past.positions, new_pos], 1) if has_past else new_pos
        scores = colsum if colsum is not None else torch.zeros(positions.shape, device=q.device)
        if has_past:
            scores[:, : past.scores.shape[1]] += past.scores
        found = Candidates(keys, values, positions, scores, masses)
        if self._between_chunks:
            self._plan(table, sequence, found, int(q_pos[-1]) + 1)
        else:
            self._pending |= {sequence}
            self._rewrite(table, sequence, found, positions >= 0)
        return out

    def _attend_many(
        self,
        sequence: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        q_pos: Tensor,
        past_pos: Tensor | None,
        reduce: Reduce | None,
        past_log_masses: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Attention of many queries over stored and new entries, with its column sums: `ops.prefill`."""
        if self._focus is not None and not self._shape.window:
            budget = self._budget(self._require_table(), sequence, int(q_pos[-1]) + 1)
            return *self._focus.attend(sequence, q, k, v, q_pos, budget, self._shape, self.rope), None
        return ops.prefill(
            q, k, v, q_pos, past_pos, colsum=reduce, past_log_masses=past_log_masses, **self._shape.kwargs
        )

    def _append(self, table: RegionTable, sequence: int, k: Tensor, v: Tensor, q_pos: Tensor) -> None:
        """Store all new entries behind the stored ones."""
        rows = table.rows(sequence)
        n_heads, n_new = k.shape[:2]
        table.privatise(whole=False)
        start = table.lens[rows].clone()
        after = table.lengths()[sequence] + n_new
        table.reserve(sequence, after)
        index = torch.arange(n_new, dtype=torch.int32, device=k.device).expand(n_heads, -1).contiguous()
        count = torch.full((n_heads,), n_new, dtype=torch.int32, device=k.device)
        ops.write(table.pool.arrays, table.pages[rows], start, count, index, k, v, q_pos.expand(n_heads, -1))
        table.set_lengths(sequence, after)

    def moments(self, sequence: int) -> QueryMoments:
        """Sums over the queries of one sequence so far, for a policy that asks for them.

        Raises:
            CacheMismatchError: nothing was summed.
        """
        found = self._queries.moments(sequence)
        if found is None:
            raise CacheMismatchError(f"layer {self.index} has summed no queries: run a prompt with a score that asks")
        return found

    # ------------------------------------------------------------------ plan and apply

    def _budget(self, table: RegionTable, sequence: int, seen: int) -> int:
        budget = self._entries(table, sequence, seen)
        return min(budget, self._shape.window) if self._shape.window else budget

    def _fits_window(self, table: RegionTable, sequence: int, seen: int) -> bool:
        """Whether the budget holds all that a sliding window shows, so that there is nothing to choose."""
        return bool(self._shape.window) and self._entries(table, sequence, seen) >= self._shape.window

    def _set_budget(self, table: RegionTable, sequence: int, budget: int, caps: Tensor | None) -> None:
        numbers = np.full(table.n_kv_heads, budget) if caps is None else caps.cpu().numpy()
        if self._shape.window:
            numbers = np.minimum(numbers, self._shape.window)
        newest = 0 if self.policy.keeps_all else self.policy.protect.newest(budget)
        table.set_budget(sequence, numbers.astype(np.int32), newest)

    @property
    def pending(self) -> bool:
        """Whether there are entries that no plan has seen."""
        return bool(self._pending)

    def settle(self, found: Peek | None = None) -> None:
        """Plan now what waits for the end of the prompt; scores rise to what was `found`."""
        self._settle(self._require_table(), found)

    def _settle(self, table: RegionTable, found: Peek | None = None) -> None:
        """Plan what a prompt in several passes left for its end."""
        if not self._pending:
            return
        if found is None and self.policy.repeats_prompt:
            raise OptionError(
                "drafts follow a prompt before it could be repeated, as in assisted generation; use another method "
                "with it"
            )
        for sequence in sorted(self._pending):
            entries = Candidates(*self._dense(table, sequence))
            if found is not None:
                seen_again = found.at(sequence, entries.positions)
                entries = entries._replace(scores=torch.maximum(entries.scores, seen_again))
            self._plan(table, sequence, entries, int(entries.positions.max()) + 1)
        self._pending = frozenset()

    def _plan(self, table: RegionTable, sequence: int, found: Candidates, seen: int, budget: int | None = None) -> None:
        """Choose what stays of one sequence and make it so; without a `budget` under that of `seen` tokens."""
        alive = found.positions >= 0
        if self._shape.window:  # what no later query can see
            alive &= seen - found.positions < self._shape.window
        known = budget is not None and self.policy.waits  # only the first plan asks what the prompt decided
        if self.policy.keeps_all or (not known and self._fits_window(table, sequence, seen)):
            self._rewrite(table, sequence, found, alive)
            self._set_budget(table, sequence, UNBOUNDED, None)
            if self._headwise is not None:
                self._headwise.settle(table, sequence, None)
            return
        budget = self._budget(table, sequence, seen) if budget is None else budget
        found = found._replace(scores=self._signal(sequence, found))
        positions = torch.where(alive, found.positions, -1)
        order = by_position(positions)
        view = self._view(sequence, found, positions, order, seen)
        plan = self.policy.plan(view, budget)
        if plan.merged is None:
            self._rewrite(table, sequence, found, torch.zeros_like(alive).scatter_(1, order, plan.keep))
        else:
            self._take(table, sequence, plan.merged, view.positions, plan.keep)
        self._set_budget(table, sequence, budget, plan.caps)
        if self._headwise is not None:
            assert isinstance(plan, NestedPlan)
            self._headwise.settle(table, sequence, plan)

    def _take(self, table: RegionTable, sequence: int, merged: Merged, positions: Tensor, keep: Tensor) -> None:
        """Hold what a plan has merged, in fresh pages."""
        masses = merged.log_masses if self.policy.mass_bias else None
        found = Candidates(merged.keys, merged.values, positions, merged.scores, masses)
        self._rewrite(table, sequence, found, keep)
        if merged.memory is not None:
            self._memories[sequence] = merged.memory

    def _view(self, sequence: int, found: Candidates, positions: Tensor, order: Tensor, seen: int) -> View:
        """What the policy sees of candidates, their signal as `scores`, in the given order.

        positions: of the candidates, -1 for those that it shall not see.
        """
        view = View(
            positions.gather(1, order), found.scores.gather(1, order), seen, self.index,
            int(self.timeline.origin[sequence]), read=lambda part: self._contents(found, part, order),
            outputs=self.outputs, memory=self._memories.get(sequence),
            log_masses=None if found.log_masses is None else found.log_masses.gather(1, order),
            latest=lambda: self._latest(sequence, found).gather(1, order),
        )  # fmt: skip
        if self.policy.sums_queries:
            view = self._with_moments(view, sequence)
        return view if self._headwise is None else self._with_tokens(view, sequence, found, order)

    def _contents(self, found: Candidates, part: Literal["keys", "values"], order: Tensor) -> Tensor:
        """(H, N, dim): the keys or the values of candidates in the given order, for a score that looks at them."""
        entries = found.keys if part == "keys" else found.values
        return entries.gather(1, order[..., None].expand(-1, -1, entries.shape[-1]))

    def _with_moments(self, view: View, sequence: int) -> QueryView:
        """The view, and the moments of the queries of `sequence`."""
        return QueryView(
            **{part.name: getattr(view, part.name) for part in fields(view)},
            moments=self.moments(sequence),
            rotate=self.rope.rotate if self.rope is not None else None,
            scale=self._shape.scale,
        )

    def _with_tokens(self, view: View, sequence: int, found: Candidates, order: Tensor) -> View:
        """The view, with token ids and the attention by query head of candidates in the given order."""
        tokens, headwise = self.timeline.tokens, self._headwise
        assert tokens is not None, "token ids are kept for a policy that looks at them"
        assert headwise is not None

        def look(width: int) -> Tensor:
            keys, n_kv_heads = self._keys_of(sequence, found), len(found.positions)
            positions = found.positions.expand(len(keys), -1)
            sums = headwise.received(sequence, keys, positions, self._shape, n_kv_heads, width)
            return sums.gather(2, order[:, None].expand_as(sums))

        row = torch.tensor([sequence], device=order.device)
        return replace(view, tokens=lambda: tokens.at(row, view.positions[None])[0], look=look)

    def _keys_of(self, sequence: int, found: Candidates) -> Tensor:
        """(H, N, key_dim): the keys that queries meet."""
        return found.keys

    def _signal(self, sequence: int, found: Candidates) -> Tensor:
        """(H, N) float32: what the policy's score is made of."""
        if not self.policy.window or self.policy.observes_all:
            return found.scores
        return self._latest(sequence, found)

    def _latest(self, sequence: int, found: Candidates) -> Tensor:
        """(H, N) float32: the attention of the last queries that are kept."""
        q, q_pos = self._queries.last(sequence)
        return self._look_back(sequence, q, q_pos, found)

    def _look_back(self, sequence: int, q: Tensor, q_pos: Tensor, found: Candidates) -> Tensor:
        """The attention of the prompt's last queries: `window_signal`."""
        reduce = REDUCE[self.policy.reduce]
        return window_signal(
            q, found.keys, q_pos, found.positions, reduce=reduce, log_masses=found.log_masses, **self._shape.kwargs
        )

    def _rewrite(self, table: RegionTable, sequence: int, found: Candidates, keep: Tensor) -> None:
        """Hold exactly the kept candidates, in the order of their positions, in fresh neighbouring pages."""
        order = by_position(torch.where(keep, found.positions, -1))
        counts = keep.sum(1)
        lens = counts.cpu().numpy().astype(np.int32)
        rows = table.rows(sequence)
        table.renew(sequence, lens)
        index = order[:, : int(lens.max(initial=0))].int().contiguous()
        ops.write(
            table.pool.arrays, table.pages[rows], torch.zeros_like(counts).int(), counts.int(), index,
            found.keys, found.values, found.positions, found.scores, found.log_masses,
        )  # fmt: skip
        table.set_lengths(sequence, lens)

    def _dense(self, table: RegionTable, sequence: int) -> ops.Dense:
        rows = table.rows(sequence)
        width = int(table.lengths()[sequence].max(initial=0))
        return ops.read(table.pool.arrays, table.pages[rows], table.lens[rows], width)

    # ------------------------------------------------------------------ the batch

    def select(self, sequences: list[int]) -> None:
        """Become the given sequences, in this order (beams, batch selection, repetition)."""
        if self._table is not None:
            self._table.select(sequences)
            self._queries = self._queries.copy(sequences)
            self._pending = frozenset(i for i, s in enumerate(sequences) if s in self._pending)
            self._memories = {i: self._memories[s] for i, s in enumerate(sequences) if s in self._memories}
            if self._rolling is not None:
                self._rolling.select(sequences)
            if self._headwise is not None:
                self._headwise = self._headwise.copy(sequences)
            if self._focus is not None:
                self._focus = self._focus.copy(sequences)

    # ------------------------------------------------------------------ going back

    @property
    def truncatable(self) -> bool:
        """Whether the newest entries can simply be cut off: nothing ever left."""
        follows = self._focus is None or self._focus.truncatable
        return self.policy.keeps_all and not self._shape.window and follows

    def truncate(self, columns: int, tokens: np.ndarray) -> None:
        """Cut off the newest `columns`, which hold `tokens` (n_seq,) entries of every region of a sequence."""
        if self._table is not None:
            for sequence, lens in enumerate(self._table.lengths()):
                self._table.set_lengths(sequence, lens - tokens[sequence].astype(np.int32))
            self.columns -= columns

    def fork(self) -> LayerState:
        """The state as it is now, to `restore` later or to `release`."""
        table = self._table.fork() if self._table is not None else None
        rolling = self._rolling.copy() if self._rolling is not None else None
        headwise = self._headwise.copy() if self._headwise is not None else None
        focus = self._focus.copy() if self._focus is not None else None
        memories = dict(self._memories)  # replaced, never written to
        return LayerState(table, self.columns, self._pending, self._queries.copy(), memories, rolling, headwise, focus)

    def restore(self, state: LayerState) -> None:
        """Go back to a forked state, which is used up."""
        if self._table is not None:
            self._table.clear()
        self._table, state.table = state.table, None
        self.columns, self._pending = state.columns, state.pending
        self._queries, self._memories = state.queries, state.memories
        self._rolling, self._headwise, self._focus = state.rolling, state.headwise, state.focus

    def reset(self) -> None:
        """Give back every page and forget every token."""
        if self._table is not None:
            self._table.clear()
        self._table = None
        self._rule = self.policy.decode_rule(self.index)
        self._queries = QueryMemory(self.policy)
        self._memories = {}
        self._pending, self._nan = frozenset(), None
        self.columns = 0
        if self._headwise is not None:
            self._headwise = self._headwise.copy([])
        self._focus = focus_of(self.policy, self.index)
        if self._rolling is not None:
            self._rolling.reset()
