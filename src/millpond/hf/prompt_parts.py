"""Long prompts of `generate()` in parts: activations of one part at a time, with the result of an uncut prompt.

A plan of the kept entries waits for the last part, as it would for the end of one pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import transformers
from torch import Tensor
from transformers import GenerationMixin, PreTrainedModel

from millpond.cache.layer.layer_cache import LayerCache
from millpond.errors import OptionError
from millpond.hf.model_profile import ModelProfile, named
from millpond.hf.signals.rotary import changes_with_length
from millpond.models.cache_argument import CACHE_ARGUMENTS
from millpond.policy.policy import Policy

#: Tokens of a part, at the most.
PART = 512
#: Prompts up to this length are read as a whole: parts of 1,536 tokens took 5 % longer (bf16, a CPU), of 4,096 none.
UNCUT = 2048
#: Tensor arguments of generate() that can be cut where the ids are.
_CUT = {"input_ids", "inputs", "attention_mask", *CACHE_ARGUMENTS}
#: Whether `generate` of the installed transformers cuts what is new of a later turn; before 5.21 it cuts the whole.
CUTS_LATER_TURNS = tuple(map(int, transformers.__version__.split(".")[:2])) >= (5, 21)
#: Methods of GenerationMixin that cut prompts; a model that has its own may do otherwise.
_CUTTING_METHODS = ("generate", "_prefill")
#: Settings of generate() under which a prompt is read otherwise, or its pass is observed.
_OTHER_READERS = (
    "prefill_chunk_size",
    "assistant_model",
    "prompt_lookup_num_tokens",
    "assistant_early_exit",
    "custom_generate",
    "output_hidden_states",
    "use_mtp",
)


class PromptCut(NamedTuple):
    """How a prompt is read: tokens of a pass, and the columns after its last."""

    size: int
    end: int


class PromptParts:
    """State of a prompt that is read in parts.

    Args:
        policy: Policy of the cache.
        layer_caches: Caches of the layers.
        stays: Whether a plan evicts nothing and stores all as the model made it, so that it frees nothing.
        limited: Whether there is a limit of bytes, which entries that wait for a plan may not fit.
    """

    def __init__(self, policy: Policy, layer_caches: Sequence[LayerCache], *, stays: bool, limited: bool) -> None:
        self.policy, self.stays, self.limited = policy, stays, limited
        self._layer_caches = layer_caches
        self._end = 0  # columns after the prompt; 0: none is read in parts

    def waits(self, columns: int) -> bool:
        """Whether more of a prompt comes after `columns` columns."""
        return columns < self._end

    def expected(self, sequence: int, seen: int) -> int:
        """Return the tokens that a sequence of `seen` tokens will have at the prompt's end.

        It is `seen` if the end is not known.
        """
        if not self._end:
            return seen
        tracker = self._layer_caches[0].tracker
        pads = tracker.columns - int(tracker.seen[sequence])
        return max(seen, self._end - pads)

    def end(self) -> bool:
        """End the parts; return whether there were any."""
        had_parts, self._end = self._end > 0, 0
        for layer_cache in self._layer_caches if had_parts else ():
            layer_cache.reading = False
        return had_parts

    @contextmanager
    def reading(self, end: int) -> Iterator[None]:
        """Let plans wait until `end` columns are read, or the block ends."""
        self._end = end
        for layer_cache in self._layer_caches:
            layer_cache.reading = True
        try:
            yield
        finally:
            self.end()


def part_size(model: PreTrainedModel, parts: PromptParts, n_tokens: int) -> int | None:
    """Return the tokens of each pass of a prompt of `n_tokens` tokens; None for one pass.

    Prompts are read in one pass on a GPU, by methods and models whose result depends on where a prompt is cut, and if
    the entries that wait for a plan would take more than one pass of the prompt, or might not fit a limit.
    """
    if n_tokens <= UNCUT or model.device.type != "cpu":
        return None
    profile = ModelProfile.of(model)
    if not _may_be_cut(model, profile, parts.policy):
        return None
    waits = not parts.stays and parts.policy.prefill != "chunks"
    if waits and (parts.limited or not _pays(profile)):
        return None
    size = -(-n_tokens // -(-n_tokens // PART))
    while n_tokens % size == 1:  # a pass of one token decodes
        size -= 1
    return size


def part_of_generate(
    model: PreTrainedModel, parts: PromptParts, columns: int, ids: Any, config: Any, kwargs: dict[str, Any]
) -> PromptCut | None:
    """Return how a call of `generate` best reads its prompt; None for one pass.

    Args:
        model: Model of the call.
        parts: State of the cache's prompt.
        columns: Columns that the cache has read.
        ids: Ids of the prompt, (S, n).
        config: Generation config of the call.
        kwargs: Keyword arguments of the call.
    """
    if not isinstance(ids, Tensor) or ids.ndim != 2 or (columns and (len(ids) > 1 or not CUTS_LATER_TURNS)):
        return None
    if "prefill_chunk_size" in kwargs or any(kwargs.get(name, getattr(config, name, None)) for name in _OTHER_READERS):
        return None
    other_arguments = [argument for name, argument in kwargs.items() if name not in _CUT]
    if any(isinstance(argument, Tensor) for argument in other_arguments) or model.config.output_hidden_states:
        return None
    mask = kwargs.get("attention_mask")
    only_new = isinstance(mask, Tensor) and mask.shape[1] > ids.shape[1]
    n_new = ids.shape[1] - (0 if only_new else columns)
    size = part_size(model, parts, n_new)
    return None if size is None else PromptCut(size, columns + n_new)


def check_uncut(policy: Policy, columns: int, ids: Any, config: Any, kwargs: dict[str, Any]) -> None:
    """Check that a call of `generate` does not cut a prompt that must be read uncut.

    Args:
        policy: Policy of the cache.
        columns: Columns that the cache has read.
        ids: Ids of the prompts of the call, (S, n).
        config: Generation config of the call.
        kwargs: Keyword arguments of the call.

    Raises:
        OptionError: the call would cut a prompt, and its method takes it uncut, or transformers would read it again.
    """
    size = kwargs.get("prefill_chunk_size", getattr(config, "prefill_chunk_size", None))
    if size is None or not isinstance(ids, Tensor) or ids.shape[-1] <= size:
        return
    if columns and not CUTS_LATER_TURNS:
        raise OptionError(
            f"prefill_chunk_size={size}: transformers {transformers.__version__} would read the whole text again in "
            f"parts, and the cache has read {columns} tokens of it; upgrade it to 5.21, or leave prefill_chunk_size out"
        )
    if policy.needs.uncut:
        raise OptionError(
            f"prefill_chunk_size={size} cuts this prompt of {ids.shape[-1]} tokens, and this method decides what to "
            "keep by all of it; leave prefill_chunk_size out"
        )


def _may_be_cut(model: PreTrainedModel, profile: ModelProfile, policy: Policy) -> bool:
    """Whether the result does not depend on where a prompt is cut."""
    if policy.needs.whole_prompt or policy.prefill == "greedy":
        return False
    reads_otherwise = any(
        getattr(type(model), name, None) is not getattr(GenerationMixin, name, None) for name in _CUTTING_METHODS
    )
    return not (reads_otherwise or profile.takes_images or profile.restarts or changes_with_length(profile))


def _pays(profile: ModelProfile) -> bool:
    """Whether the entries of all layers take less memory than a pass of as many tokens.

    They wait for the plan.
    """
    config: Any = profile.config
    width = config.hidden_size
    if profile.latent is not None:
        numbers = profile.latent.latent_dim + profile.latent.rope_dim
    else:
        kv_heads = named(config, "num_key_value_heads") or profile.n_heads
        numbers = 2 * kv_heads * (named(config, "head_dim") or width // profile.n_heads)
    return bool(profile.n_layers * numbers < 3 * (named(config, "intermediate_size") or 4 * width) + 6 * width)
