"""Policy: a method as the composition of a score, a protection, an allocation, triggers and a position rule."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from millpond.codec.spec import Codec
from millpond.errors import NumericsError, OptionError
from millpond.kernels.decode_rules import KEEP_ALL, UNBOUNDED, DecodeRule, Evict, Reduce, Spacing
from millpond.option_ranges import check_parts
from millpond.policy.codec_refusal import codec_refusal
from millpond.policy.decode_rule import room_order
from millpond.policy.eviction_plan import Counts, EvictionPlan, with_rest
from millpond.policy.head_allocation import HeadAllocation, PromptHeadAllocation, Uniform
from millpond.policy.layer_allocation import EvenLayers, LayerAllocation, PromptLayers
from millpond.policy.merging import Merge, Merged
from millpond.policy.needs import NOTHING, Needs, TokenSource
from millpond.policy.protect import Protect
from millpond.policy.scores.attention import Recency, Score, decay_of
from millpond.policy.scores.over_hidden import FindNetworks, over_hidden, with_networks
from millpond.policy.scores.strided import Strided
from millpond.policy.scores.trained import FindGates, FindHeads, retained, with_heads
from millpond.policy.selection import keep_best, rank_by_value
from millpond.policy.trained.hidden_networks import HiddenNetworks
from millpond.policy.trained.networks import Gates, RetainingHeads
from millpond.policy.view import View

REDUCE = {"mean": Reduce.MEAN, "max": Reduce.MAX, "sum": Reduce.SUM}

#: Positions between two evictions of a prompt, by default.
CHUNK = 256


@dataclass(frozen=True, slots=True)
class Policy:
    """Method as a composition.

    Attributes:
        score: Score that decides; None keeps everything.
        protect: Entries that no score can evict.
        layers: Split of the whole budget over the layers.
        heads: Split of a layer's budget over its KV heads.
        reduce: Reduction of the query heads of a GQA group to one number per KV head: mean, max or sum.
        shared: All KV heads of a layer keep the same positions (the score is averaged over them).
        every_step: Evict at each decoding step; else the cache grows while decoding, and a short later turn stays whole
            (`Protect.keeps_short_turn`), such as a question about a compressed text.
        once: A sequence that has lost entries loses no more; else each later turn ends with a plan for all of it.
        prefill: "once" scores the whole prompt with full attention and plans at its end; "greedy" evicts at each token
            of the prompt, as if it had been decoded; "chunks" evicts behind every `chunk` positions, so that no layer
            ever holds more than budget + chunk entries per KV head.
        chunk: Positions between two evictions with prefill="chunks", counted from the beginning of the text, so that it
            changes nothing in which passes a prompt is read.
        stabilizers: Newest entries that stay when a chunk ends and more of the prompt follows: a count, or a share of
            the budget.
        positions: "absolute" leaves keys where the text put them; "cache_relative" closes the gaps between entries by
            exact rotation: between sinks and recent ones at each step, so that no distance exceeds the cache; between
            entries anywhere before the positions end that the model was trained on.
        merge: Merge of entries that leave into those that stay; None drops them.
        mass_bias: Attention adds the log of its mass to the logit of a slot that stands for several entries.
        plan_every: Entries that gather beyond the budget while decoding before a plan evicts or merges them.
        seed: Seed of random scores and random merges.
        bounded: Heads that would grow while decoding stop at their budget, see `makes_room`.
    """

    score: Score | None = None
    protect: Protect = field(default_factory=Protect)
    layers: LayerAllocation | PromptLayers = field(default_factory=EvenLayers)
    heads: HeadAllocation | PromptHeadAllocation = field(default_factory=Uniform)
    reduce: Literal["mean", "max", "sum"] = "mean"
    shared: bool = False
    every_step: bool = True
    once: bool = False
    prefill: Literal["once", "greedy", "chunks"] = "once"
    chunk: int = CHUNK
    stabilizers: int | float = 0
    positions: Literal["absolute", "cache_relative"] = "absolute"
    merge: Merge | None = None
    mass_bias: bool = False
    plan_every: int = 1
    seed: int = 0
    bounded: bool = False

    def __post_init__(self) -> None:
        if self.reduce not in REDUCE:
            raise OptionError(f"reduce={self.reduce!r} must be one of {', '.join(REDUCE)}")
        if self.shared and not isinstance(self.heads, Uniform):
            raise OptionError("a set shared by all heads of a layer cannot have head budgets of its own")
        if self.needs_unrotated_queries and self.positions != "absolute":
            raise OptionError(
                'a score over queries before RoPE needs positions="absolute": cache-relative ones rotate queries again'
            )
        if self.prefill == "greedy" and not self.every_step:
            raise OptionError(
                'prefill="greedy" evicts at each token of the prompt, so decoding has to evict at each step'
            )
        if self.once and self.every_step:
            raise OptionError("what is compressed once grows while decoding; a policy that evicts at each step cannot")
        if self.needs_all_layers and (self.prefill == "greedy" or (self.plans_each_step and self.merge is None)):
            raise OptionError(
                "layer budgets that depend on the prompt need a score that plans once at its end, not at each token; "
                "give across=false, or a method whose layers have budgets of their own"
            )
        if self.scores_entries and (self.prefill == "greedy" or self.shared):
            raise OptionError("scores given to each KV head when an entry is written need prefill='once' or 'chunks'")
        if self.prefill == "chunks":
            self._check_chunks()
        self._check_merge()
        self._check_prompt_protection()

    def check_prompt(self, n_tokens: int) -> None:
        """Refuse a prompt so long that these options would take far longer than others.

        Raises:
            OptionError: options under which so long a prompt would take far longer than others.
        """
        if self.prefill == "chunks":
            check_parts("chunk", self.chunk, CHUNK, n_tokens)

    def _check_chunks(self) -> None:
        if self.chunk < 1:
            raise OptionError(f"chunk={self.chunk} must be at least 1 token")
        Protect(recent=self.stabilizers)
        if self.score is None:
            raise OptionError('prefill="chunks" evicts while a prompt is read, and this policy keeps everything')
        if self.score.queries in ("all", "window", "both") or self.needs.later_text or self.needs_all_layers:
            raise OptionError(
                'prefill="chunks" evicts before the rest of the prompt is read, and this score is made of later '
                "queries or of the whole prompt; use locret, keydiff, knorm, lagkv or qfilters, or prefill='once'"
            )
        if isinstance(self.heads, PromptHeadAllocation) or self.merge is not None:
            raise OptionError(
                'prefill="chunks" goes with scores alone: heads that decide by the prompt, and merging, need '
                "prefill='once'"
            )
        if self.once:
            raise OptionError(
                'prefill="chunks" ends each chunk with an eviction, and a policy that evicts once cannot tell a chunk '
                "from a later turn; let it grow or evict while decoding"
            )

    def _check_merge(self) -> None:
        if self.plan_every < 1:
            raise OptionError(f"plan_every={self.plan_every} must be at least 1 step")
        if self.merge is None:
            if self.mass_bias:
                raise OptionError("mass_bias belongs to a policy that merges; leave it out")
            if self.plan_every != 1 and (self.score is None or self.score.evict is not None):
                raise OptionError("plan_every belongs to a policy that merges or plans while decoding; leave it out")
            return
        if self.score is None:
            raise OptionError("a policy that keeps everything has nothing to merge")
        if self.positions != "absolute":
            raise OptionError('merging needs positions="absolute": a merged key cannot be rotated to another place')
        if self.every_step and isinstance(self.heads, PromptHeadAllocation):
            raise OptionError(
                "heads with rules of their own drop entries while decoding; merge over a method that grows then"
            )
        if self.decode_allocation.every:
            raise OptionError(
                f"heads compete every {self.decode_allocation.every} steps and drop what they lose; with merging they "
                "compete at each plan, so set every=0"
            )

    def _check_prompt_protection(self) -> None:
        if not self.protect.prompt:
            return
        if self.every_step and not self.plans_each_step:
            raise OptionError(
                "a prompt is protected by plans, and this score evicts in the decode kernel, which knows no prompts; "
                "use random_attention, vase, triattention or rkv, or mark its spans (PromptMarks(keep=...))"
            )
        if self.prefill != "once" or self.positions != "absolute":
            raise OptionError(
                "a prompt is protected as a whole, at its end and where it lies; use prefill='once' and "
                "positions='absolute'"
            )

    @property
    def needs(self) -> Needs:
        """Needs beyond keys, values and attention."""
        return NOTHING

    @property
    def keeps_all(self) -> bool:
        """Whether nothing is ever evicted."""
        return self.score is None

    @property
    def heads_differ(self) -> bool:
        """Whether the heads of a layer may keep other tokens each."""
        return not (self.keeps_all or self.shared or isinstance(self.score, Recency))

    @property
    def takes_budget(self) -> bool:
        """Whether a budget limits what is kept, or what is attended to if everything is kept.

        It limits what is kept or, if everything is kept, what is attended to.
        """
        return not self.keeps_all

    @property
    def needs_budget(self) -> bool:
        """Whether the default budget applies if none is given."""
        return self.takes_budget

    @property
    def observes_all(self) -> bool:
        """Whether the prompt's column sums over all queries are needed."""
        return self.score is not None and self.score.queries in ("all", "both")

    @property
    def window(self) -> int:
        """Number of the prompt's last queries that a plan needs; 0 for none."""
        return self.score.window if self.score is not None and self.score.queries in ("window", "both") else 0

    @property
    def decay(self) -> float:
        """Factor on all gathered attention at each new token."""
        return decay_of(self.score)

    @property
    def sums_queries(self) -> bool:
        """Whether the moments of all queries are needed."""
        return self.score is not None and self.score.queries in ("rotated", "unrotated")

    @property
    def entry_scores(self) -> RetainingHeads | None:
        """Networks that score each entry when it is written; None if there are none."""
        trained = retained(self.score)
        return None if trained is None else trained.heads

    @property
    def hidden_networks(self) -> HiddenNetworks | None:
        """Networks that score each entry by its token's hidden state; None if there are none."""
        trained = over_hidden(self.score)
        return None if trained is None else trained.networks

    @property
    def reads_hidden(self) -> bool:
        """Whether each entry is scored by its token's hidden state, given to the layer."""
        return over_hidden(self.score) is not None

    @property
    def gates(self) -> Gates | None:
        """Gates that flag each entry to stay or not when it is written; None if there are none."""
        return None

    @property
    def scores_entries(self) -> bool:
        """Whether each entry is scored when it is written, and keeps that score."""
        return retained(self.score) is not None or self.reads_hidden

    @property
    def needs_rotation(self) -> bool:
        """Whether queries or keys are needed as they were before RoPE."""
        return self.needs_unrotated_queries or (self.scores_entries and not self.reads_hidden)

    @property
    def sums_prompt(self) -> bool:
        """Whether a plan needs all queries of a prompt: column sums, moments, or themselves."""
        return self.observes_all or self.sums_queries or self.needs.head_rules is not None

    @property
    def needs_unrotated_queries(self) -> bool:
        """Whether the queries are summed as they were before RoPE."""
        return self.score is not None and self.score.queries == "unrotated"

    @property
    def plans_each_step(self) -> bool:
        """Whether decoding steps end with a plan: no kernel rule then scores, or merges."""
        return self.score is not None and self.every_step and (self.score.evict is None or self.merge is not None)

    @property
    def needs_all_layers(self) -> bool:
        """Whether no entry can leave before all layers have read the prompt, to share the budget."""
        return isinstance(self.layers, PromptLayers)

    @property
    def grows(self) -> bool:
        """Whether the budget of a sequence follows its text while it is decoded (`AnchorPolicy`)."""
        return False

    @property
    def plans_below_budget(self) -> bool:
        """Whether heads may hold less than a budget that bounds plans while decoding."""
        return False

    @property
    def makes_room(self) -> bool:
        """Whether decoding evicts at the budget where the method itself would grow (`bounded`)."""
        return self.bounded and self.grows_when_decoded

    @property
    def grows_when_decoded(self) -> bool:
        """Whether some heads keep everything decoded until the next plan."""
        heads_grow = isinstance(self.heads, PromptHeadAllocation) and self.heads.grows
        return not self.keeps_all and (heads_grow or not self.every_step)

    @property
    def heads_are_uniform(self) -> bool:
        """Whether all KV heads of a layer hold the same number of entries."""
        return isinstance(self.heads, Uniform)

    @property
    def heads_alike(self) -> bool:
        """Whether all KV heads of all layers hold the same number of entries."""
        return self.heads_are_uniform and isinstance(self.layers, EvenLayers)

    @property
    def heads_may_keep_all(self) -> bool:
        """Whether some heads may keep a whole prompt and answer, whatever the average is."""
        return isinstance(self.heads, PromptHeadAllocation)

    @property
    def gathers(self) -> bool:
        """Whether the scores stored with the entries go into later plans."""
        return self.observes_all or self.scores_entries

    @property
    def decode_allocation(self) -> HeadAllocation:
        """Competition of the heads of a full layer while decoding.

        There is none if the plan decides for each.
        """
        return Uniform() if isinstance(self.heads, PromptHeadAllocation) else self.heads

    def with_tokens(self, source: TokenSource) -> Policy:
        """Return the policy with the facts about tokens that it needs, or itself if it needs none.

        Raises:
            OptionError: the source does not know it.
        """
        return self

    def with_heads(self, find: FindHeads) -> Policy:
        """Return the policy with the retaining heads of a model, or itself if its score uses none.

        Raises:
            OptionError: there are none.
            CacheMismatchError: those that it names are another model's.
        """
        return self if retained(self.score) is None else replace(self, score=with_heads(self.score, find))

    def with_gates(self, find: FindGates) -> Policy:
        """Return the policy with the gates of a model (`GatePolicy`), see `with_heads`."""
        return self

    def with_networks(self, find: FindNetworks) -> Policy:
        """Return the policy with the networks of a model over hidden states, see `with_heads`."""
        return replace(self, score=with_networks(self.score, find)) if self.reads_hidden else self

    def check_budget(self, budget: int) -> None:
        """Check that what must be protected, or stay when a chunk ends, fits into `budget`.

        Raises:
            BudgetError: what must be protected, or what must stay when a chunk ends, does not fit into `budget`.
        """
        self.protect.check(budget)
        if self.prefill == "chunks":
            self.protected(budget, True).check(budget)

    def protected(self, budget: int, between: bool) -> Protect:
        """Return the entries that no score can evict.

        `between` chunks of a prompt stabilizers are among them.
        """
        if not between:
            return self.protect
        newest = replace(self.protect, recent=self.stabilizers).newest(budget)
        return replace(self.protect, recent=max(newest, self.protect.newest(budget)))

    def check_codec(self, codec: Codec) -> None:
        """Check that quantized entries give all that the method needs.

        Raises:
            OptionError: the method needs something that quantized entries cannot give.
        """
        reason = self.codec_refusal(codec)
        if reason is not None:
            raise OptionError(f"codec {codec.name!r}: {reason}")

    def codec_refusal(self, codec: Codec) -> str | None:
        """Return why entries cannot be stored in a number format, with the way out, or None."""
        return codec_refusal(self, codec)

    def kept_refusal(self) -> str | None:
        """Return why spans of a text cannot be kept in every head, with the way out, or None."""
        if self.positions == "cache_relative" and isinstance(self.score, Recency):
            return (
                "this method turns its first tokens to the places before its newest ones at each step, and has no such "
                "place for tokens between them; give positions='absolute'"
            )
        return None

    def fair_refusal(self) -> str | None:
        """Return why spans cannot have a share of the budget, with the way out, or None."""
        if self.keeps_all:
            return self.kept_refusal()
        if self.heads_may_keep_all or type(self).plan is not Policy.plan:
            return "this method's heads keep what rules of their own say; keep the spans whole, or use another method"
        if self.positions == "cache_relative":
            return "this method moves positions; give positions='absolute'"
        if self.prefill == "greedy":
            return "prefill='greedy' evicts before the length of a text is known; give prefill='once'"
        return None

    def layer_seed(self, layer: int) -> int:
        """Return the seed of one layer."""
        return (self.seed * 1_000_003 + layer * 7919 + 1) & 0x7FFFFFFF

    def decode_rule(self, layer: int) -> DecodeRule:
        """Return the rule by which the decode kernel evicts at each step."""
        if self.score is None or not (self.every_step or self.makes_room):
            return KEEP_ALL
        shared = DecodeRule(
            sinks=self.protect.sinks,
            shared=self.shared,
            seed=self.layer_seed(layer),
            spacing=self.score.spacing if isinstance(self.score, Strided) else Spacing(),
        )
        if self.makes_room:
            return replace(shared, evict=room_order(self.score, self.heads, gathers=self.gathers))
        evict = Evict.NEVER if self.score.evict is None or self.merge is not None else self.score.evict
        return replace(shared, signal=self.score.signal, reduce=REDUCE[self.reduce], evict=evict, decay=self.decay)

    def newest(self, layer: int, caps: Counts, budget: int) -> Counts:
        """Return how many of the newest entries each head protects while decoding, (H,).

        If eviction uses the scores of the last plan, which newer entries lack, at least half of the capacity that the
        sinks leave is protected.

        Args:
            layer: Index of the layer.
            caps: Most entries per head, (H,).
            budget: Their mean.
        """
        newest = np.full_like(caps, 0 if self.keeps_all else self.protect.newest(budget))
        if not self.makes_room or not self.decode_rule(layer).evict.by_score:
            return newest
        return np.maximum(newest, (caps - self.protect.sinks) // 2)

    def plan(self, view: View, budget: int, *, between: bool = False) -> EvictionPlan:
        """Choose the entries of `view` to keep under `budget` entries per head.

        Args:
            view: Entries of one layer of one sequence.
            budget: Entries per head on average.
            between: More of the prompt follows (prefill="chunks").

        Raises:
            BudgetError: what must be protected does not fit.
            NumericsError: the scores are NaN.
        """
        assert self.score is not None, "a policy that keeps everything makes no plan"
        protect = self.protected(budget, between)
        protect.check(budget)
        pinned = protect.mask(view, budget, 0 if self.every_step else view.turn)
        view = replace(view, budget=budget, pinned=pinned)
        value = self.value(view)
        if bool((value.isnan() & view.valid).any()):
            raise NumericsError(
                f"layer {view.layer}: the attention scores are NaN; check the model's weights and inputs"
            )
        if view.fair is not None:
            pinned = view.fair.pinned(value, view.valid, pinned, view.positions, budget)
            view = replace(view, pinned=pinned)
        decided = self.heads.decide(view) if isinstance(self.heads, PromptHeadAllocation) else None
        heads = decided if decided is not None else self.decode_allocation
        counts = heads.keep_counts(value, view.valid, pinned, budget)
        keep = keep_best(value, view.valid, pinned, counts)
        n_kept, n_held = torch.stack([counts, view.counts]).cpu().numpy()
        caps = self.caps(n_kept, n_held, budget)
        if decided is not None and not self.bounded:
            caps = np.where(decided.grows.cpu().numpy(), UNBOUNDED, caps)
        standing = None
        if self.makes_room and not self.gathers:
            standing = (value.shape[1] - rank_by_value(value, view.valid, pinned)).float()
        return EvictionPlan(keep, caps, merged=self._merged(view, keep, value), standing=standing)

    def _merged(self, view: View, keep: Tensor, value: Tensor) -> Merged | None:
        """Return the columns of the view after the policy's merge; None if nothing leaves."""
        if self.merge is None or not bool((view.valid & ~keep).any()):
            return None
        return self.merge.merge(view, keep, value, self.layer_seed(view.layer))

    def value(self, view: View, n_layers: int = 1) -> Tensor:
        """Return (n_layers * H, N) the value of each entry of a view, higher is kept."""
        assert self.score is not None, "a policy that keeps everything makes no plan"
        value = self.score.score(view, self.layer_seed(view.layer))
        if not self.shared:
            return value
        by_layer = value.view(n_layers, -1, value.shape[1])
        return by_layer.mean(1, keepdim=True).expand_as(by_layer).flatten(0, 1)

    def caps(self, counts: Counts, held: Counts, budget: int) -> Counts:
        """Return the most entries that each head may hold after a plan, (H,) on the host.

        Args:
            counts: (H,) entries that stay, on the host.
            held: (H,) entries before, on the host.
            budget: Entries per head on average.
        """
        if self.makes_room:
            return with_rest(counts, budget)
        if not self.every_step:
            return np.full_like(counts, UNBOUNDED)
        if (counts < held).any():
            return counts
        return np.full_like(counts, budget) if (counts <= budget).all() else with_rest(counts, budget)
