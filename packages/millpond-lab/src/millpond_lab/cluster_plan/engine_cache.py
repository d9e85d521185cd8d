"""The size of a request's cache in an engine, for a plan."""

from __future__ import annotations

from millpond.engine.engine import Engine
from millpond.runner.cache_layout import CacheLayout
from millpond.runner.packed_model import LayerShape
from millpond_lab.cluster_plan.cache_size import CacheSize


def cache_of(engine: Engine) -> tuple[CacheSize, int]:
    """What a request of an engine holds with its own method, budget and codec, and the numbers of a key.

    Raises:
        OptionError: a budget in bytes.
    """
    layers, recipe = engine.layers, engine.recipe
    entry_bytes = float(sum(recipe.entry_bytes(layer) for layer in layers))
    stored = sum(_stored_bytes(recipe, layer) for layer in layers)
    policy = recipe.policy
    grows = policy.keeps_all or (policy.grows_when_decoded and not policy.makes_room)
    budget = None if policy.keeps_all else recipe.budget
    return CacheSize(entry_bytes, stored, budget, grows), layers[0].key_dim


def _stored_bytes(recipe: CacheLayout, layer: LayerShape) -> float:
    """Bytes of a kept token in one layer; codes as far as they take no more than numbers as they are."""
    own, codec = recipe.entry_bytes(layer), recipe.codec(layer)
    if codec is None:
        return own
    numbers = layer.n_kv_heads * (layer.key_dim + layer.value_dim)
    return min(own, numbers * codec.bits_per_element(layer.key_dim, layer.value_dim) / 8)
