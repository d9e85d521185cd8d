"""Models in which some layers have no keys of their own and read those of an earlier layer (Gemma 3n, Gemma 4)."""

from __future__ import annotations

from millpond.errors import UnsupportedModelError
from millpond.hf.model_profile import ModelProfile
from millpond.policy.policy import Policy


def readers_of(profile: ModelProfile, number: int) -> frozenset[int]:
    """Return the numbers of the layers that read the entries of layer `number`."""
    return frozenset(reader for reader, owner in profile.shared.items() if owner == number)


def check_shared(profile: ModelProfile, policy: Policy, method: str) -> None:
    """Check that a method can run on a model whose layers share keys.

    Raises:
        UnsupportedModelError: the model has layers that share keys, and the method changes more about attention than
            which entries there are.
    """
    if not profile.shared:
        return
    needs, layers = policy.needs, ", ".join(map(str, profile.shared))
    subject = f"{profile.name} lets layers {layers} read the keys of others, and method {method!r}"
    if policy.positions == "cache_relative":
        raise UnsupportedModelError(
            f"{subject} moves the positions of keys, which the queries of those layers would not follow; use "
            'positions="absolute"'
        )
    if policy.prefill == "chunks" or policy.needs.prompt_flags is not None:
        raise UnsupportedModelError(
            f"{subject} evicts while a prompt is read, before those layers have read it; use "
            f"{policy.needs.whole_prompt_option}"
        )
    if needs.prompt_repeat is not None:
        raise UnsupportedModelError(f"{subject} repeats the prompt over one layer's keys at a time; use another method")
    if needs.block_lookup is not None or needs.prompt_patterns is not None:
        raise UnsupportedModelError(
            f"{subject} stores everything and chooses for the queries of each layer alone; use a method that evicts"
        )
