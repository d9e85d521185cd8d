"""Refusals of number formats by what a policy does with stored entries."""

from __future__ import annotations

from typing import Protocol

from millpond.codec.spec import Codec
from millpond.policy.head_allocation import HeadAllocation
from millpond.policy.merging import Merge
from millpond.policy.needs import Needs

#: What to do where a method and a number format do not compose.
WAY_OUT = "use codec='bf16', or another method"


class StoringPolicy(Protocol):
    """Properties of a policy that decide whether its entries can be codes, see `Policy`."""

    @property
    def positions(self) -> str: ...

    @property
    def prefill(self) -> str: ...

    @property
    def merge(self) -> Merge | None: ...

    @property
    def every_step(self) -> bool: ...

    @property
    def keeps_all(self) -> bool: ...

    @property
    def sums_queries(self) -> bool: ...

    @property
    def decode_allocation(self) -> HeadAllocation: ...

    @property
    def needs(self) -> Needs: ...


def storage_refusal(policy: StoringPolicy) -> str | None:
    """Return why entries cannot become codes of a storage codec, with the way out, or None.

    Args:
        policy: Policy whose entries they are.
    """
    if policy.merge is not None:
        return (
            "this method merges entries, and a merged one is none of the numbers that a transform is fitted to; use a "
            "method that drops them (h2o, snapkv, kvzip)"
        )
    if policy.positions == "cache_relative":
        return (
            "this method turns stored keys to positions in the cache, and codes are made of keys turned back from "
            "those of the text; give positions='absolute'"
        )
    if policy.needs.block_lookup is not None:
        return "this method finds entries by means of blocks of keys, which codes would change; use method 'full'"
    return None


def codec_refusal(policy: StoringPolicy, codec: Codec) -> str | None:
    """Return why entries cannot be stored in a number format, with the way out, or None.

    Args:
        policy: Policy whose entries they are.
        codec: The number format.
    """
    if policy.positions == "cache_relative":
        return "this method turns stored keys to new positions, and codes cannot be turned; give positions='absolute'"
    if policy.merge is not None and policy.every_step:
        return (
            "this method merges into stored entries while decoding, and a sealed group cannot be written again; "
            f"merge at the end of the prompt alone (decode='grow'), or {WAY_OUT}"
        )
    if codec.rotated and policy.sums_queries:
        return f"this method's score turns queries back by their positions, which a Hadamard rotation hides; {WAY_OUT}"
    if codec.across_heads and not policy.keeps_all:
        return (
            "it takes the range of a token from all heads, and this method keeps tokens in some heads alone; use "
            f"method 'full', or {codec.name.replace('_paper', '')}, whose ranges are those of a head"
        )
    if codec.prune_values and policy.prefill == "greedy":
        return (
            "the value channels to drop are chosen by what the prompt's last queries read, and this method stores "
            "entries before it is read; give prefill='once', or a codec that drops key channels alone"
        )
    return _tier_refusal(policy) if codec.tiered else None


def _tier_refusal(policy: StoringPolicy) -> str | None:
    """Return why evicted entries cannot be demoted to fewer bits instead; None if they can."""
    if policy.keeps_all:
        return (
            "what a method would evict goes to the lower tier, and this one evicts nothing; use h2o, snapkv or another"
        )
    if policy.decode_allocation.every:
        return (
            f"heads compete every {policy.decode_allocation.every} steps for one budget, and a lower tier has none; "
            "set every=0"
        )
    if policy.merge is not None:
        return f"this method merges evicted entries, so nothing is left for a lower tier; {WAY_OUT}"
    return None
