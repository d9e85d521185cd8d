"""One sequence's caches of all layers as named tensors, and back.

Only slots that hold an entry are stored, so that heads with few entries cost few bytes, and engines with pages of
different sizes understand each other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from millpond.cache.batch_cache import BatchCache, Pages
from millpond.cache.pages.ref_counted_pool import Pool
from millpond.cache.serialization import ENTRIES, from_tensors, part_prefix, to_tensors
from millpond.errors import DataError
from millpond.hf.document import PREFIX, restore_states, state_tensors
from millpond.hf.state_layers import States
from millpond.runner.cache_factory import CacheFactory
from millpond.runner.packed_model import LayerShape


def cache_tensors(stack: BatchCache, *, later_prompts: bool = False) -> dict[str, Tensor]:
    """All that is needed to continue the one sequence of a stack, whose prompt was planned; on the host.

    later_prompts: see `to_tensors`.
    """
    found = {
        f"{core.index}.{name}": t
        for core in stack.layers
        for name, t in _dense(to_tensors(core, later_prompts=later_prompts)).items()
    }
    found["closed"] = torch.tensor(int(stack.timeline.closed[0]))
    return found | (state_tensors(stack.states) if isinstance(stack.states, States) else {})


def sequence_tensors(
    recipe: CacheFactory, stack: BatchCache, place: int, *, later_prompts: bool = False
) -> dict[str, Tensor]:
    """`cache_tensors` of one sequence of a stack, which stays there."""
    one = recipe.stack()
    try:
        stack.lend([place], one)
        return cache_tensors(one, later_prompts=later_prompts)
    finally:
        one.clear()


def pages_of(
    recipe: CacheFactory, layers: Sequence[LayerShape], caches: Sequence[Mapping[str, Tensor]], n: int
) -> Pages:
    """Pages that stored sequences take, and slots of states for `n` answers; numbers are checked later."""
    need: Counter[Pool] = Counter()
    for cache in caches:
        for index, layer in enumerate(layers):
            pool = recipe.pool(layer)
            lens = cache.get(f"{index}.lens", torch.zeros(1)).long().clamp(min=0)
            need[pool] += int((-(-lens // pool.slots)).sum())
            for number, packed in enumerate(recipe.packed_pools(layer)):
                owned = cache.get(f"{index}.{part_prefix(number)}owned", torch.zeros(1))
                need[packed] += int(owned.long().clamp(min=0).sum())
    if recipe.slots is not None:
        need[cast(Pool, recipe.slots)] += n
    return dict(need)


def fill_cache(
    stack: BatchCache,
    recipe: CacheFactory,
    layers: list[LayerShape],
    n_heads: int,
    stored: Mapping[str, Tensor],
    ids: Tensor,
) -> None:
    """Let an empty stack hold the sequence that `cache_tensors` was given, which has read the tokens `ids` (n,).

    Args:
        recipe: of the stack. layers: what each stores. n_heads: query heads; 0 where the model names no number.

    Raises:
        DataError: tensors of other layers, or that do not fit together. PoolFullError: there is no room. In both
            cases the caller clears the stack.
    """
    closed = _closed(stored, recipe, len(ids))
    text, ids = ids, ids[closed:]
    for core, layer in zip(stack.layers, layers, strict=True):
        own = f"{core.index}."
        part = {name.removeprefix(own): t for name, t in stored.items() if name.startswith(own)}
        dtype = recipe.pool(layer).arrays.dtype
        part = _padded(core.index, layer, dtype, n_heads, part)
        if closed and "origins" not in part:
            raise DataError(f"layer {core.index}: the request's cache lacks where its entries stood in the text")
        from_tensors(core, part, len(ids), ids.device)
    states: Any = stack.states
    if isinstance(states, States):
        restore_states(states, {name: t for name, t in stored.items() if name.startswith(PREFIX)}, ids.device)
    stack.timeline.adopt(ids[None])
    stack.timeline.closed[0] = len(text) - len(ids)
    for core in stack.layers:
        core.columns = len(ids)


def _closed(stored: Mapping[str, Tensor], recipe: CacheFactory, n_tokens: int) -> int:
    """Positions that closed gaps took away of a text of `n_tokens`.

    Raises:
        DataError: more than the text has, or where gaps do not close, or fewer than the context needs.
    """
    given = stored.get("closed", torch.tensor(0))
    closed = int(given) if given.numel() == 1 and given.dtype == torch.int64 else -1
    most = 0 if recipe.reach is None else n_tokens
    if not 0 <= closed <= most or recipe.within_reach(n_tokens - closed) < n_tokens - closed:
        raise DataError(f"the request's cache has lost {closed} positions of {n_tokens} tokens; send the request again")
    return closed


def _dense(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Entries (heads, width, ...) as (entries, ...), without the slots behind those of each head."""
    held = _held(tensors["lens"], tensors["positions"].shape[1])
    return {name: t[held] if name in ENTRIES else t for name, t in tensors.items()}


def _padded(
    index: int, layer: LayerShape, dtype: torch.dtype, n_heads: int, part: dict[str, Tensor]
) -> dict[str, Tensor]:
    """What `_dense` was given.

    Raises:
        DataError: entries of another number, shape or type than this layer holds; nothing was allocated.
    """

    def need(right: bool, rule: str) -> None:
        if not right:
            raise DataError(f"layer {index}: the request's cache does not fit ({rule}); send the request once more")

    for name in ("keys", "values", "positions", "scores", "lens"):
        need(name in part, f"it has {name}")
    lens, n = part["lens"], len(part["positions"]) if part["positions"].ndim == 1 else -1
    need(lens.shape == (layer.n_kv_heads,) and lens.dtype == torch.int32, f"it has {layer.n_kv_heads} KV heads")
    need(bool((lens >= 0).all()) and int(lens.long().sum()) == n, f"its heads hold {n} entries together")
    need(part["keys"].shape == (n, layer.key_dim), f"a key has {layer.key_dim} numbers")
    need(part["values"].shape == (n, layer.value_dim), f"a value has {layer.value_dim} numbers")
    need(part["keys"].dtype == part["values"].dtype == dtype, f"entries are {dtype}")
    for name in ("queries", "moments.total"):
        need(not n_heads or name not in part or part[name].shape[:1] == (n_heads,), f"there are {n_heads} query heads")
    means = part.get("focus.means")
    need(not n_heads or means is None or means.shape[1:2] == (n_heads,), f"there are {n_heads} query heads")
    width = int(lens.max()) if len(lens) else 0
    held = _held(lens, width)
    padded = dict(part)
    for name in ENTRIES:
        if (found := part.get(name)) is not None:
            need(len(found) == n, f"there are {n} {name}")
            room = found.new_full((len(lens), width, *found.shape[1:]), -1 if name == "positions" else 0)
            room[held] = found
            padded[name] = room
    return padded


def _held(lens: Tensor, width: int) -> Tensor:
    """(heads, width) whether a slot holds an entry."""
    return torch.arange(width) < lens.cpu()[:, None]
