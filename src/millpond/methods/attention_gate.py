"""Attention-Gate: a trained gate flags each entry when it is written (Zeng et al., 2024, arXiv:2410.12876)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Annotated, Literal

import torch
from torch import Tensor

from millpond.errors import DataError, OptionError
from millpond.kernels.decode_rules import UNBOUNDED
from millpond.methods import method
from millpond.option_files import FILE, read_file
from millpond.option_ranges import POSITIONS, SHARE, SOME_POSITIONS
from millpond.policy.head_allocation import Ada
from millpond.policy.layer_allocation import EvenLayers
from millpond.policy.needs import Needs
from millpond.policy.policy import CHUNK, Policy
from millpond.policy.prompt_flags import PromptFlags
from millpond.policy.protect import Protect
from millpond.policy.scores.trained import FindGates, Gated
from millpond.policy.threshold_policy import ThresholdPolicy
from millpond.policy.trained.file import gates_of
from millpond.policy.trained.networks import SINKS, WINDOW, Gates


@dataclass(frozen=True, slots=True)
class GatedHeads:
    """Allocation that keeps entries above a threshold and protected ones, and never too few.

    Where that is more than the budget, the highest values of all heads together stay, and the total is the budget.

    Attributes:
        threshold: 0 to 1.
        least: Entries that a head keeps at least: a count, or a share of those it has.
    """

    threshold: float = 0.5
    least: int | float = 0
    every: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.threshold <= 1:
            raise OptionError(f"threshold={self.threshold} is compared with a probability; give 0 to 1")
        if self.least < 0 or (isinstance(self.least, float) and self.least > 1):
            raise OptionError(f"floor={self.least} must be a count of entries, or a share of them from 0.0 to 1.0")

    def floor(self, protected: Tensor, budget: Tensor | int) -> Tensor:
        return protected.clamp(min=1)

    def keep_counts(self, value: Tensor, valid: Tensor, pinned: Tensor, budget: int) -> Tensor:
        counts = (valid & (pinned | (value > self.threshold))).sum(1)
        n_entries = valid.sum(1)
        min_entries = self._least(n_entries)
        if budget < int(min_entries.max()):
            min_entries = min_entries.clamp(max=budget)
        counts = torch.minimum(counts.maximum(min_entries), n_entries)
        if int(counts.sum()) <= len(value) * budget:
            return counts
        return Ada(alpha=0.0).keep_counts(value, valid, pinned, budget)

    def _least(self, n_entries: Tensor) -> Tensor:
        """Return (H,) int64, at least 1: entries that heads of `n_entries` (H,) always keep."""
        if isinstance(self.least, float):
            return n_entries.new_tensor([max(1, math.ceil(round(self.least * n, 9))) for n in n_entries.tolist()])
        return n_entries.new_full(n_entries.shape, max(1, self.least))


@dataclass(frozen=True, slots=True)
class GatePolicy(ThresholdPolicy):
    """Policy that drops entries which a gate did not flag once they are no longer the newest.

    Entries are flagged when they are written. With prefill="chunks" plans come behind every `chunk` positions of a
    prompt too.

    Attributes:
        hides: The queries of a prompt do not see entries without a flag that are not among their newest.
    """

    hides: bool = False

    def __post_init__(self) -> None:
        is_plain = isinstance(self.heads, GatedHeads) and isinstance(self.layers, EvenLayers) and not self.shared
        if not (is_plain and self.merge is None and isinstance(self.score, Gated)):
            raise OptionError("a method whose gates say what stays cannot be the score of another method")
        if self.prefill == "chunks" and not self.hides:
            raise OptionError('prefill="chunks" evicts inside a prompt what its queries still see; give hides=True')
        ThresholdPolicy.__post_init__(self)

    @property
    def gates(self) -> Gates | None:
        """Networks of the gates; None until `with_gates` gets those of a model."""
        return self.score.gates if isinstance(self.score, Gated) else None

    @property
    def needs(self) -> Needs:
        looks_ahead = self.gates is not None and not self.gates.causal
        return Needs(whole_prompt=looks_ahead, uncut=looks_ahead, prompt_flags=self._flags if self.hides else None)

    @property
    def _flags(self) -> PromptFlags:
        """Which entries the queries of a prompt see."""
        assert isinstance(self.heads, GatedHeads), "checked when the policy was made"
        newest, chunk = self.protect.newest(UNBOUNDED), self.chunk if self.prefill == "chunks" else 0
        return PromptFlags(self.heads.threshold, self.protect.sinks, newest, chunk)

    @property
    def scores_entries(self) -> bool:
        return True

    def with_gates(self, find: FindGates) -> GatePolicy:
        assert isinstance(self.score, Gated), "checked when the policy was made"
        gates = find(self.score.gates)
        return replace(self, score=replace(self.score, gates=gates), prefill=_prefill(gates, self.hides))


def _prefill(gates: Gates | None, hides: bool) -> Literal["once", "chunks"]:
    """Return how a prompt is read.

    It is read in chunks if its flags act inside it and are known behind each of them.
    """
    return "chunks" if hides and (gates is None or gates.causal) else "once"


@method("attention_gate", paper="arXiv:2410.12876")
def attention_gate(
    gate: Annotated[
        str, "a file of 'millpond train gate' for this model; empty: the one that comes with the package", FILE
    ] = "",
    threshold: Annotated[float, "an entry whose probability is above it stays, 0 to 1", SHARE] = 0.5,
    sinks: Annotated[int, "first positions that always stay", POSITIONS] = SINKS,
    window: Annotated[int, "newest positions that always stay, as in training", POSITIONS] = WINDOW,
    floor: Annotated[
        int | float, "entries that a KV head keeps at least: a count, or a share of those it has", POSITIONS, SHARE
    ] = 0,
    decode: Annotated[
        Literal["evict", "grow"], "after the prompt: act on the flags of new tokens too, or grow until the next turn"
    ] = "evict",
    every: Annotated[int, "with decode=evict: new tokens from one look at the flags to the next", SOME_POSITIONS] = 16,
    acts: Annotated[
        Literal["prompt", "end"],
        "flags act inside a prompt: later queries of it do not see what has none (the paper); or at its end alone",
    ] = "prompt",
    chunk: Annotated[int, "with acts=prompt: tokens of a prompt between two evictions", SOME_POSITIONS] = CHUNK,
) -> Policy:
    """Let a trained gate choose the tokens whose entries each KV head keeps.

    So the text determines how much is kept.

    With acts="prompt" query i of a prompt sees entry j if j = i, j < sinks, i - j < window, or j is flagged:
    a_ij = m_ij exp(s_ij) / sum_j' m_ij' exp(s_ij'). What none of the next queries sees leaves behind every `chunk`
    tokens, so that no head holds more than it keeps, a window and a chunk; with --global, when the prompt has been
    read. The first 64 tokens of a later turn see all that is stored. acts="end" reads a prompt in full, which is
    faster: with acts="prompt" plans behind each chunk take time, less of it with a larger `chunk`, and so do blocks of
    at most `window` rows, less of it with a larger `window`.

    p = sigmoid(W2 SiLU(W1 [x; u] + b1) + b2) for each layer, one number per KV head, where x is the query, key and
    value of the token before RoPE and u an attention of a few narrow heads: causal, over those of the text so far, or
    with a file of `millpond train gate --global` over the whole prompt, which is then read in one pass. An entry with
    p > threshold is kept; sinks and the newest `window` positions stay whatever it says. A flag never changes; a causal
    one depends on the text before it alone. Without a budget the cache is as large as the flags make it; a budget
    is the most that it may be: where more is flagged, the highest p of a layer stay. `millpond train gate` trains the
    gate on a frozen model, for a share that is to be kept.

    What a gate has read, a narrow key and value of each token in 16 bits, is kept besides the entries
    (`stats().gate_bytes`), since later flags look back at it.

    A file of `millpond train gate --lora R`, the paper's second route, holds a low-rank adapter of the attention
    projections too, y = W x + B A x. It acts in the passes of its cache, and in the engine on the rows of its requests;
    the weights of the model do not change. Such a pass goes through the model's modules, so an engine whose weights are
    codes or read layer by layer, or with deterministic=True, refuses it.

    Departs from the paper: the newest `window` positions are seen whatever their flags are, so that a prompt can be
    read in chunks. The gate sees the layer's normed input through the query, key and value that are made of it, and a
    layer of its own between attention and flag; the paper has the input and one linear map. A short later turn, such
    as a question, stays whole. The paper's gate looks at the whole prompt: that is --global; the tokens behind the
    prompt look back from where they stand.
    """
    evicts, hides, gates = decode == "evict", acts == "prompt", _load(gate)
    return GatePolicy(
        score=Gated(gates),
        protect=Protect(sinks=sinks, recent=window, grace=1 if evicts else 0),
        heads=GatedHeads(threshold, floor),
        every_step=evicts,
        plan_every=every if evicts else 1,
        hides=hides,
        prefill=_prefill(gates, hides),
        chunk=chunk,
    )


def _load(path: str) -> Gates | None:
    if not path:
        return None
    try:
        return gates_of(read_file(path), str(path))
    except (OptionError, DataError) as error:
        raise OptionError(f"attention_gate: gate={path!r}: {error}") from None
