"""Merges of decoding steps: the kernel brings the sequences of one layer back to their budgets, without a plan."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from millpond.cache.attention.paged import PagedAttention
from millpond.cache.entries import read_write
from millpond.cache.pages.page_table import PageTable
from millpond.cache.state.sequence_state import SequenceState
from millpond.kernels import ops
from millpond.kernels.args import MergeArgs
from millpond.kernels.decode_rules import Reduce
from millpond.policy.step_merge import StepMergePlan


class StepMerger:
    """Execution of the `StepMergePlan` of one layer.

    Attributes:
        looks_back: Whether the last queries must be kept.
    """

    def __init__(
        self, plan: StepMergePlan, reduce: Reduce, attention: PagedAttention, sequence_state: SequenceState
    ) -> None:
        self.looks_back = plan.looks_back
        self._plan = plan
        self._reduce = reduce
        self._attention = attention
        self._sequence_state = sequence_state

    def merge(self, table: PageTable, q_pos: Tensor, due: np.ndarray) -> None:
        """Bring the sequences that are `due` (S,) bool back to their budgets.

        q_pos (S,): positions of their newest tokens.
        """
        table.copy_on_write(whole=True)
        if not due.all():
            q_pos = torch.where(torch.from_numpy(due).to(q_pos.device), q_pos, -1)
        local = self._local(table, due) if self.looks_back else None
        memory, before = self._memory(table), table.lengths().ravel()
        plan, budgets = self._plan, (table.capacities, table.recent)
        ops.merge_slots(MergeArgs(table.regions, *budgets, q_pos, memory, plan.leave, plan.rule, local))
        table.merged(due, before)
        if self._plan.rule.moves:
            for sequence in np.flatnonzero(due).tolist():
                self._sequence_state.memories[sequence] = memory[sequence]

    def _memory(self, table: PageTable) -> Tensor:
        """Return what the last merge of each sequence left, (S,) float64; NaN for nothing."""
        memory = torch.full((table.n_seq,), torch.nan, dtype=torch.float64, device=table.lens.device)
        for sequence, before in self._sequence_state.memories.items():
            memory[sequence] = before
        return memory

    def _local(self, table: PageTable, due: np.ndarray) -> Tensor:
        """Return the attention of the last queries of each due sequence, by slot, (R, n) float32."""
        width = int(table.lengths().max(initial=0))
        local = torch.zeros(table.n_regions, width, device=table.lens.device)
        for sequence in np.flatnonzero(due).tolist():
            entries = read_write.read(table, sequence)
            q, at = self._sequence_state.queries.last(sequence)
            signal = self._attention.look_back(sequence, q, at, entries, self._reduce)
            local[table.rows(sequence), : signal.shape[1]] = signal
        return local
