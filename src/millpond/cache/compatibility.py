"""Which methods a number format composes with, and why not with the others."""

from __future__ import annotations

from millpond.codec.spec import Codec
from millpond.errors import OptionError
from millpond.policy.policy import Policy
from millpond.policy.variants.block_retrieval import BlockRetrievalPolicy
from millpond.policy.variants.head_rules import HeadRulesPolicy

#: What to do instead.
WAY_OUT = "use codec='bf16', or another method"


def check_method_codec(policy: Policy, codec: Codec) -> None:
    """
    Raises:
        OptionError: the method asks for something that entries stored as codes cannot give.
    """
    for applies, reason in (*_of_method(policy), *_of_codec(policy, codec)):
        if applies:
            raise OptionError(f"codec {codec.name!r}: {reason}")


def _of_method(policy: Policy) -> list[tuple[bool, str]]:
    return [
        (
            policy.positions == "cache_relative",
            "this method turns stored keys to new positions, and codes cannot be turned; give positions='absolute'",
        ),
        (
            policy.merge is not None and policy.every_step,
            "this method merges into stored entries while decoding, and a sealed group cannot be written again; merge "
            f"at the end of the prompt alone (decode='grow'), or {WAY_OUT}",
        ),
        (
            isinstance(policy, BlockRetrievalPolicy),
            f"this method looks single positions up in plain pages; {WAY_OUT}",
        ),
    ]


def _of_codec(policy: Policy, codec: Codec) -> list[tuple[bool, str]]:
    return [
        (
            codec.rotated and policy.sums_queries,
            f"this method's score turns queries back by their positions, which a Hadamard rotation hides; {WAY_OUT}",
        ),
        (
            codec.tiered and policy.keeps_all,
            "what a method would evict goes to the lower tier, and this one evicts nothing; use h2o, snapkv or another",
        ),
        (
            codec.tiered and bool(policy.decode_allocation.every),
            f"heads compete every {policy.decode_allocation.every} steps for one budget, and a lower tier has none; "
            "set every=0",
        ),
        (
            codec.tiered and isinstance(policy, HeadRulesPolicy),
            f"the rules of this method's heads drop entries for good; {WAY_OUT}",
        ),
        (
            codec.tiered and policy.merge is not None,
            f"this method merges what leaves, so nothing is left for a lower tier; {WAY_OUT}",
        ),
    ]
