"""Cache of one layer: writes entries, attends, scores, plans and evicts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple, Self, TypeVar

import numpy as np
import torch
from torch import Tensor

from millpond.cache.attention.paged import PagedAttention
from millpond.cache.entries.due import quantize_due
from millpond.cache.layer.decode_step import DecodeStep, PendingStep
from millpond.cache.layer.entry_scores import new_entry_scores, scores_of_hidden
from millpond.cache.layer.layer_storage import LayerStorage
from millpond.cache.layer.prompt_pages import FindPool, PromptPages, let_go
from millpond.cache.layer.prompt_pass import PartialSpan, PromptPass
from millpond.cache.layer.shared_entries import SharedEntries
from millpond.cache.pages.aged_store import QuantizedPart
from millpond.cache.pages.page_table import PageTable
from millpond.cache.pages.ref_counted_pool import Pool
from millpond.cache.planning.planner import Planner
from millpond.cache.planning.prompt_selection import Wanted
from millpond.cache.state.positions import ForwardSpan, PositionTracker
from millpond.cache.state.reconstruction import ReconstructionProbe
from millpond.cache.state.sequence_state import SequenceState
from millpond.cache.types import RotaryEmbedding
from millpond.kernels.args import AttentionShape
from millpond.policy.eviction_plan import Counts
from millpond.policy.policy import Policy
from millpond.policy.scores.query_moments import QueryMoments
from millpond.policy.view import View

T = TypeVar("T")
#: How the tokens of a pass are read: one per sequence or a few, decoded together; or those of a prompt, as if they were
#: decoded one after another or all at once.
PassKind = Literal["decode_one", "decode_few", "greedy_prompt", "prompt"]


class OpenPass(NamedTuple):
    """A pass that is ready to run.

    Attributes:
        kind: How its tokens are read.
        table: Table that they join.
        q: Queries (S, Hq, Q, key_dim), as they meet stored keys.
        k: Keys (S, Hkv, Q, key_dim), as they are stored.
        v: Values (S, Hkv, Q, value_dim), as they are stored.
        scores: Scores (S, Hkv, Q) float32 of the new entries; None for those of the method.
    """

    kind: PassKind
    table: PageTable
    q: Tensor
    k: Tensor
    v: Tensor
    scores: Tensor | None


class LayerCache(LayerStorage):
    """The cache of one attention layer for a batch of sequences.

    Args:
        index: Index of the layer.
        policy: Policy that chooses which entries are kept.
        entries: Budget in entries per KV head, `entries(table, sequence, seen)`, of a sequence of `seen` tokens.
        pool: Function that returns the pool of pages of a shape.
        tracker: Positions of the sequences, shared by all layers.
        between_chunks: Whether to plan at the end of every multi-token pass; else once, before the next single-token
            pass.
        rotary: Rotary embedding of the keys, for policies with cache-relative positions.
        quantized: Maker of the quantized part,
            `quantized(layer, n_seq, n_kv_heads, key_dim, value_dim, device)`; None if all entries stay plain.
        reading: Function that returns the pool of a prompt's pages until its plan; None for the same pool.

    Attributes:
        probe: Observer of multi-token passes, whose tokens are not stored while it is set.
        reconstruction: Probe whose scores are lower bounds of all scores while it is set.
        reading: Whether a prompt is read in parts: its plan waits, and a pass of one token belongs to it.
        scores_answers: Whether decoded tokens are scored as they are written too, if the policy scores entries; False
            if nothing is planned or evicted after the prompt.
        shared: Entries of a pass that other layers read, set by the model integration; None in most models.
        attention: Attention of queries to entries.
        planner: Planner that chooses the entries that are kept.
    """

    _attention_type = PagedAttention  # a subclass may read elsewhere

    def __init__(
        self,
        index: int,
        policy: Policy,
        entries: Callable[[PageTable, int, int], int],
        pool: FindPool,
        tracker: PositionTracker,
        *,
        between_chunks: bool = True,
        rotary: RotaryEmbedding | None = None,
        quantized: Callable[[int, int, int, int, int, torch.device], QuantizedPart] | None = None,
        reading: FindPool | None = None,
    ) -> None:
        super().__init__(index, policy, tracker, SequenceState.of(policy, index, rotary))
        self.probe: ReconstructionProbe | None = None
        self.reconstruction: ReconstructionProbe | None = None
        self.reading = False
        self.scores_answers = True
        self.shared: SharedEntries | None = None
        self.attention = self._attention_type(index, self.sequence_state)
        self.planner = Planner(policy, entries, tracker, self.attention, self.sequence_state)
        self._decode_step = DecodeStep(index, policy, tracker, self.attention, self.planner, self.sequence_state)
        self._prompt_pass = PromptPass(policy, self.attention, self.planner, self.sequence_state, self._decode_step)
        self._pool = pool
        self._quantized = quantized
        self._between_chunks = between_chunks
        self._prompt = PromptPages(pool, None if policy.prefill == "greedy" else reading, self._waits)
        self._opened = False

    # ------------------------------------------------------------------ scores and plans

    def measure(self, sequence: int, of: Callable[[View], T]) -> T:
        """Return `of` of one sequence as a plan would see it now."""
        return self.planner.measure(self._require_table(), sequence, of, self.reconstruction)

    def moments(self, sequence: int) -> QueryMoments:
        """Return sums over the queries of one sequence so far, for a policy that needs them.

        Raises:
            CacheMismatchError: nothing was summed.
        """
        return self.planner.views.moments(sequence)

    def wanted(self) -> Wanted | None:
        """Return what the plan that waits for the end of the prompt asks.

        None if it cannot be made with those of other layers.
        """
        table = self._table
        return None if table is None or self.reconstruction is not None else self.planner.wanted(table)

    def room(self) -> PageTable:
        """Return the table for what a plan keeps.

        It is the one with the entries, or an empty one in other pages.
        """
        table = self._require_table()
        return self._prompt.room(table) or table

    def end_joint_plan(self, into: PageTable, wanted: Wanted, capacities: Counts | None) -> None:
        """End the plan that `wanted` asked: hold what was moved to a table of `room`."""
        table = self._require_table()
        self.planner.end_joint_plan(into, wanted, capacities)
        if into is not table:
            let_go(table)
        self._table = into

    def run_plans(self) -> None:
        """Run the plan that waits for the end of the prompt, and quantize entries that are due."""
        table = self._table = self.planner.run_deferred(self._require_table(), self._prompt, self.reconstruction)
        quantize_due(table, np.ones(table.n_seq, dtype=bool))

    # ------------------------------------------------------------------ the step

    def before_rope(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys and values that the model continues with: here its new ones."""
        return k, v

    def after_rope(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return the entries for `attend`, from the model's result of `before_rope`: itself."""
        return k, v

    def forget(self) -> None:
        """Drop state of the last pass that only a rollback of its tokens would need: here nothing."""

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, shape: AttentionShape, hidden: Tensor | None = None
    ) -> Tensor:
        """Add new tokens and return their attention over the kept entries and themselves.

        Args:
            q: Queries (B, Hq, Q, key_dim) after RoPE.
            k: Keys (B, Hkv, Q, key_dim) after RoPE.
            v: Values (B, Hkv, Q, value_dim).
            mask: Mask (B, >= Q) bool, newest columns last, False for pads, which are never stored; None if there are
                none.
            shape: Scale, soft cap and window of the layer.
            hidden: What the attention module read of the tokens (B, Q, width), for a policy that `reads_hidden`.

        Returns:
            (B, Hq, Q, value_dim); zero at pads.

        Raises:
            PoolFullError, CacheMismatchError, BudgetError, NumericsError, UnsupportedModelError: see `millpond.errors`.
        """
        span = self.tracker.span(self.columns, q.shape[2], q.shape[0], mask, q.device)
        kind, table, q, k, v, scores = self._open_pass(q, k, v, span, shape, hidden)
        if kind == "decode_one":
            out = self._decode_step.one(table, q, k, v, span, self.columns, scores)
        elif kind == "decode_few":
            out = self._decode_step.few(table, q, k, v, span)
        elif kind == "greedy_prompt":
            out = self._prompt_pass.read_greedily(table, q, k, v, span, self.columns)
        else:
            waits, probe = self._waits(), self.probe
            out = self._prompt_pass.read(table, q, k, v, span, self.columns, waits=waits, probe=probe, scores=scores)
        return self._close_pass(table, span, out)

    def _open_pass(
        self, q: Tensor, k: Tensor, v: Tensor, span: ForwardSpan, shape: AttentionShape, hidden: Tensor | None
    ) -> OpenPass:
        """Prepare a pass: its table, and its tokens as the layer stores them.

        A plan that waits for the pass runs before. Other layers that read the entries of this one see them from now on.

        Raises:
            PoolFullError: see `attend`.
        """
        table = self._open_table(k, v, shape)
        kind = self._kind(table, q.dtype, span)
        self.planner.settle()
        if kind == "decode_one" and self.pending:
            table = self._table = self.planner.run_deferred(table, self._prompt)
        elif kind == "prompt" and self.probe is None:
            table = self._table = self._prompt.begin(table, k.dtype)
        scores, basis = None, table.basis
        if self.policy.scores_entries and self.probe is None and (kind != "decode_one" or self.scores_answers):
            if self.policy.reads_hidden:
                scores = scores_of_hidden(self.policy, self.index, hidden, k)
            else:
                rotary, contexts = self.attention.rotary, self.sequence_state.contexts
                scores = new_entry_scores(self.policy, self.index, rotary, q, k, v, span, contexts)
        if basis is not None:
            q, k, v = basis.stored(q, k, v)
        if self.shared is not None:
            if kind == "decode_one":
                quantize_due(table, span.after > span.before)
            self.shared.collect(table, k, v, span)
        return OpenPass(kind, table, q, k, v, scores)

    def _close_pass(self, table: PageTable, span: ForwardSpan, out: Tensor) -> Tensor:
        """Count the columns of a pass, and return its attention as the model expects it."""
        self.columns += span.length
        basis = table.basis
        return out if basis is None else basis.values(out)

    def _open_table(self, k: Tensor, v: Tensor, shape: AttentionShape) -> PageTable:
        """Return the table of the layer, which the first pass allocates."""
        table = self._table if self._table is not None and self._opened else self.allocate(k, v, shape)
        self.attention.shape = shape
        return table

    def _kind(self, table: PageTable, dtype: torch.dtype, span: ForwardSpan) -> PassKind:
        """Return how the tokens of a pass are read."""
        if self._decodes(span):
            return "decode_one"
        if self._decodes_few(table, dtype, span):
            return "decode_few"
        return "greedy_prompt" if self.policy.prefill == "greedy" else "prompt"

    def attend_partial(self, q: Tensor, k: Tensor, v: Tensor, part: PartialSpan, shape: AttentionShape) -> Tensor:
        """Add the tokens of a span of which only some are computed; return the attention of these.

        Each of them sees the entries at positions up to its own. The plan of the prompt waits.

        Args:
            q: Queries (Hq, R, key_dim) of the computed tokens, after RoPE.
            k: Keys (Hkv, R, key_dim) of these, after RoPE.
            v: Values (Hkv, R, value_dim) of these.
            part: Span, and which of its tokens are computed.
            shape: Scale, soft cap and window of the layer.

        Returns:
            (Hq, R, value_dim).

        Raises:
            PoolFullError: see `attend`.
        """
        span = self.tracker.span(self.columns, part.length, 1, None, q.device)
        k, v = part.complete(self.index, k, v)
        table = self._open_table(k[None], v[None], shape)
        if table.basis is not None:
            q, k, v = table.basis.stored(q, k, v)
        table = self._table = self._prompt.begin(table, k.dtype)
        return self._close_pass(table, span, self._prompt_pass.read_partial(table, q, k, v, span, part))

    def attend_newest(
        self, q: Tensor, k: Tensor, v: Tensor, shape: AttentionShape, hidden: Tensor | None = None
    ) -> Tensor:
        """Attend as `attend` for one new token of every sequence, none a pad.

        Args:
            q: Queries (S, Hq, key_dim) after RoPE.
            k: Keys (S, Hkv, key_dim) after RoPE.
            v: Values (S, Hkv, value_dim).
            shape: Scale, soft cap and window of the layer.
            hidden: What the attention module read of the tokens (S, width), as for `attend`.

        Returns:
            (S, Hq, value_dim).
        """
        table, span = self._table, self.tracker.span(self.columns, 1, q.shape[0], None, q.device)
        if table is None or table.basis is not None or not self._is_prepared or not self._decodes(span):
            states = None if hidden is None else hidden[:, None]
            return self.attend(q[:, :, None], k[:, :, None], v[:, :, None], None, shape, states)[:, :, 0]
        self.attention.shape = shape
        out = self._decode_step.step(table, q, k, v, span.token(0), self.columns, span.q_pos)
        self.columns += 1
        return out

    def is_fusable(self, n_seq: int, shape: AttentionShape, changes_basis: bool = False) -> bool:
        """Whether `attend_newest` is `begin_step`, `ops.decode` and `end_step`, and nothing else.

        Args:
            n_seq: Sequences of the step.
            shape: Shape of the layer's attention.
            changes_basis: Whether the caller hands the numbers over in `basis` and takes the output back from it.
        """
        table = self._table
        if table is None or table.is_offloaded or not self._is_prepared:
            return False
        if table.basis is not None and not changes_basis:
            return False
        return self._decodes(self._newest_span(table, n_seq)) and self._decode_step.plain(table, shape)

    def begin_step(self, n_seq: int, shape: AttentionShape) -> PendingStep:
        """Begin a step of a layer that `is_fusable`: one new token of every sequence, none a pad.

        Raises:
            PoolFullError: see `attend`; nothing was changed.
        """
        table, self.attention.shape = self._require_table(), shape
        span = self._newest_span(table, n_seq)
        return self._decode_step.begin(table, span.token(0), span.device, span.q_pos)

    def check_layers(self, lse: Tensor) -> None:
        """Refuse NaN in the attention of all layers, of which this is the first.

        It is called before `end_step`.

        Args:
            lse: Log-sum-exp (layers, S, Hq) on a device, for which no step waits.

        Raises:
            NumericsError: attention is NaN.
        """
        self._decode_step.check_layers(lse, self.columns)

    def end_step(self, step: PendingStep, lse: Tensor | None) -> None:
        """End a step after `ops.decode`.

        Args:
            step: Step that `begin_step` returned.
            lse: Log-sum-exp (S, Hq) of the attention; None after `check_layers`.

        Raises:
            NumericsError: attention is NaN.
        """
        self._decode_step.end(step, lse, self.columns)
        self.columns += 1

    def reopen(self, dtype: torch.dtype) -> None:
        """Move the entries to the pages that prompts are read into, as more of a prompt follows.

        Args:
            dtype: Type in which the model computes.

        Raises:
            PoolFullError: no room; nothing was changed.
        """
        if self.policy.prefill != "greedy":
            self._table = self._prompt.begin(self._require_table(), dtype)

    def allocate(self, k: Tensor, v: Tensor, shape: AttentionShape, *, planned: bool = False) -> PageTable:
        """Return an empty table for entries of the shapes of k and v.

        Args:
            k: Keys (B, Hkv, any, key_dim).
            v: Values (B, Hkv, any, value_dim).
            shape: Scale, soft cap and window of the layer.
            planned: Whether the entries come from a cache that has planned them.
        """
        pool = self._prompt.pool(k, v, planned=planned)
        assert pool.arrays.masses or not self.policy.mass_bias, "entries that merge with mass_bias have masses"
        quantized = None
        if self._quantized is not None:
            quantized = self._quantized(self.index, k.shape[0], k.shape[1], k.shape[-1], v.shape[-1], k.device)
            if self.sequence_state.selective is not None and self.sequence_state.selective.takes_codec(quantized.codec):
                quantized = None if not shape.window else quantized  # blocks outside of the pool are codes
            if quantized is not None and shape.window and quantized.codec.tiered:
                quantized = None  # what a window hides needs no lower tier
        table = self._table = self._table or PageTable(pool, k.shape[0], k.shape[1])
        table.quantized = quantized
        self._opened = True
        tiered = quantized is not None and quantized.codec.tiered
        self._decode_step.open(shape.window, tiered, table.aged is not None and not tiered)
        return table

    # ------------------------------------------------------------------ decoding

    @property
    def _is_prepared(self) -> bool:
        """Whether a decoding step needs no more than its pages: no plan waits, nothing is scored or published."""
        if not self._opened or self.pending or self.shared is not None or not self.planner.is_settled:
            return False
        return not (self.policy.scores_entries and self.scores_answers)

    def _decodes(self, span: ForwardSpan) -> bool:
        """Whether a pass adds one token, or a pad, to every sequence after a prompt that was read."""
        return span.length == 1 and span.begun and self.probe is None and not self.reading

    def _decodes_few(self, table: PageTable, dtype: torch.dtype, span: ForwardSpan) -> bool:
        """Whether a pass adds a few tokens after the prompt of every sequence, decoded together."""
        if not span.begun or self.probe is not None or self.reading or self.pending:
            return False
        return self._decode_step.takes_few(table, span.length, dtype)

    def _newest_span(self, table: PageTable, n_seq: int) -> ForwardSpan:
        """Return the span of one more token of every sequence."""
        return self.tracker.span(self.columns, 1, n_seq, None, table.pool.arrays.device)

    # ------------------------------------------------------------------ prompts

    def _waits(self) -> bool:
        """Whether the plan of a prompt comes later than the pass that brings it."""
        return self.reading or not self._between_chunks

    # ------------------------------------------------------------------ pages

    def pages_for(self, n_tokens: int) -> int:
        """Return the pages that the next `n_tokens` of a prompt take; 0 before the first token."""
        table, policy = self._table, self.policy
        if table is None:
            return 0
        if policy.prefill == "chunks":  # a chunk at most is held beyond the budget
            held = int(table.lengths().min(initial=0))
            budget = self.planner.budgets.of(table, 0, int(self.tracker.seen[0]) + n_tokens)
            n_tokens = min(n_tokens, policy.chunk + max(budget - held, 0))
        return table.pages_for(n_tokens, policy.observes_all or policy.prefill != "once")

    def pages_for_step(self) -> dict[Pool, int]:
        """Return the most pages that the next decoding step may take of each pool."""
        return {} if self._table is None else self._decode_step.pages(self._table)

    @property
    def appends(self) -> bool:
        """Whether the next pass only adds entries after the stored ones, or writes them to new pages."""
        return self.reading or self._decode_step.appends

    @property
    def frames(self) -> np.ndarray | None:
        """Frames of cache-relative positions (n_seq,), see `Rerotation.frames`; None if keys stay."""
        return None if self.sequence_state.rolling is None else self.sequence_state.rolling.frames

    @property
    def merges_each_step(self) -> bool:
        """Whether decoding changes entries that stay."""
        return self.policy.merge is not None and self.policy.every_step

    @property
    def truncatable(self) -> bool:
        """Whether the newest entries can simply be cut off, as nothing was ever evicted."""
        follows = self.sequence_state.selective is None or self.sequence_state.selective.truncatable
        return self.policy.keeps_all and not self.attention.shape.window and follows and not self.tracker.marks.dropped

    def reset(self) -> None:
        super().reset()
        self._opened = False
        self._decode_step.reset()

    def _take_over(self, other: Self) -> None:
        self.attention.shape, self._opened = other.attention.shape, True
        self._decode_step.take_over(other._decode_step)
