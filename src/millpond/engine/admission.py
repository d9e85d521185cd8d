"""Admission: the bytes of pages that a request will hold, before it holds any."""

from __future__ import annotations

from millpond.cache.table import RegionTable
from millpond.engine.scheduler import Need
from millpond.hf.packed import LayerShape
from millpond.hf.recipe import Recipe
from millpond.kernels.rules import Evict, Signal
from millpond.policy.decide import PromptHeads
from millpond.policy.nested import NestedPolicy


def estimate(recipe: Recipe, layers: list[LayerShape], prompt: int, answer: int, n: int) -> Need:
    """What a request holds at most: `prompt` tokens and `n` answers of at most `answer` tokens.

    While the prompt is read all of it is held, since nothing is planned before its end. Then a layer holds its
    budget, with as many more entries as its method adds before it evicts or merges again; or, for methods that keep
    all or grow while decoding, those of the answer too.
    """
    reading = shared = each = 0
    copies = _writes_everywhere(recipe)
    for index, layer in enumerate(layers):
        pool = recipe.pool(layer.key_dim, layer.value_dim)
        table = RegionTable(pool, 1, layer.n_kv_heads)
        before, after = _entries(recipe, index, layer, table, prompt, answer)
        page = pool.page_bytes * layer.n_kv_heads
        read = prompt if recipe.policy.prefill == "once" else min(prompt, before + 1)
        reading += page * (read // pool.slots + 1)
        if n == 1:
            each += page * (after // pool.slots + 1)
        elif copies:  # the prompt's pages stay until every answer has copies of its own
            shared += page * (before // pool.slots + 1)
            each += page * (after // pool.slots + 1)
        else:
            shared += page * (before // pool.slots + 1)
            each += page * ((after - before) // pool.slots + 2)
    return Need(reading, shared, each)


def _entries(
    recipe: Recipe, index: int, layer: LayerShape, table: RegionTable, prompt: int, answer: int
) -> tuple[int, int]:
    """Entries per KV head, on average over the heads, that a layer holds after the plan, and at most while decoding."""
    policy, total = recipe.policy, prompt + answer
    if policy.keeps_all:
        before, after = prompt, total
    else:
        budget = recipe.entries(index, total if policy.grows else prompt, table)
        before = min(prompt, budget)
        if isinstance(policy, NestedPolicy) or isinstance(policy.heads, PromptHeads):
            before, after = prompt, total
        elif policy.every_step:
            after = min(total, budget + policy.plan_every)
        else:
            after = before + answer
    if layer.window:
        before, after = min(before, layer.window), min(after, layer.window + policy.plan_every)
    return before, max(before, after)


def _writes_everywhere(recipe: Recipe) -> bool:
    """Whether a decoding step writes to more than the last page of a head, so that answers cannot share pages."""
    rule = recipe.policy.decode_rule(0)
    return rule.evict is not Evict.NEVER or rule.signal is not Signal.NONE or isinstance(recipe.policy, NestedPolicy)
